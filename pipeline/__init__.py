"""Text in, batches out: offline preparation of Arrow shards and the reading of them."""
