"""Looks at a machine and says what a server would refuse there: the parts of `sglang.check_env`."""
