"""Running a model over one batch: the batch's plain data, pool sizes, the runner."""
