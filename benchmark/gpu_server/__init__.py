"""One server on a GPU: TTFT by tier, CPU time of a decode step, idle time of the device."""
