"""Given texts to a model's inputs, and from its outputs back to places in the texts."""
