"""Text to shards to batches: the data floor of Cloze."""
