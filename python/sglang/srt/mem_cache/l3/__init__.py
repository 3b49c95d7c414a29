"""Reading and writing L3: operations, their grouping, what is worth reading, the breaker."""
