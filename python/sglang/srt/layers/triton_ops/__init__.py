"""Triton kernels of the layers. Imported only where a tensor is on a CUDA device, except for
`arguments`."""
