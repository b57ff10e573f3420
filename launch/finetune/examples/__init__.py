"""A kind of example a file: units that are dealt, batches, outputs that are measured."""
