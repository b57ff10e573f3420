"""Shards to batches: the order of samples, each rank's part, tensors."""
