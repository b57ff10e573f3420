"""A grid of runs: their plan, their processes, their results as a table and a picture."""
