"""DeepSpeed, imported only here and in checkpoint/deepspeed_files.py: configuration, engine, optimizers, fixes."""
