"""Checkpoints: their state, their files, and the folder of a run that contains them."""
