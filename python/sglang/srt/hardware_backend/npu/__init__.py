"""Ascend NPUs. Nothing outside this folder imports `torch_npu`."""
