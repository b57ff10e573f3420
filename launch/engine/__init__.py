"""The only room that knows DeepSpeed, beside its files in checkpoints: configuration, engine, optimizers, repairs."""
