"""DP groups that share experts: schedulers in one process, and on real ranks."""
