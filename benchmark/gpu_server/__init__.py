"""One server on a GPU: TTFT by tier, a load from L2, CPU time of a decode step, idle time."""
