"""DeepSpeed: its configuration, the engine, optimizers, and fixes of its errors. No other room imports it, except
checkpoint/deepspeed_files.py.
"""
