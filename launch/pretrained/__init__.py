"""Pretrained models: from a path, hub name or URL to a model with its tokenizer and settings."""
