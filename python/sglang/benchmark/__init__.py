"""Parts of the benchmarks: workloads, load generation, figures, cache simulation."""
