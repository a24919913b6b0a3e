"""Running a Program: the pipeline object, its ranks, its boundaries."""
