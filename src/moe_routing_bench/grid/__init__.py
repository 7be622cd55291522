"""Units of work: a cell and the job that measures it, a training run and an adaptation; settings of a measurement."""
