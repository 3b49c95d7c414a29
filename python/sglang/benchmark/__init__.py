"""What the benchmarks are made of: workloads, load generation, figures, cache simulation."""
