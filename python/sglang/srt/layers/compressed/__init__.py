"""DeepSeek-V4's layers: hyper-connections, and attention to a window and to compressed rows."""
