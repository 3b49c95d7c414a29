"""Parts of benchmarks that are not the installed load tests: simulations, conversations, clocks."""
