"""From a path or a name on the hub to a model, its tokenizer and what it is told."""
