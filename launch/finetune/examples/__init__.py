"""Kinds of examples, a file each: units that are distributed over ranks, batches, metrics of outputs."""
