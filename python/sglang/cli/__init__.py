"""The command `sglang`."""
