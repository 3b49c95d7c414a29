"""Several GPUs of one machine: sums, steps and servers by tensor and context parallelism."""
