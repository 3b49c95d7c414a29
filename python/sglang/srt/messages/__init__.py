"""Messages between processes and between servers, and their transport."""
