"""Tensors in, tensors out: the BERT family. Imports torch, safetensors and the standard library only."""
