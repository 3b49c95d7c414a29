"""Kernels of attention to a window and to compressed rows (DeepSeek-V4)."""
