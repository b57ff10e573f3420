"""Checkpoints: what they say of themselves, the files in them, and the folder of a run that holds them."""

from cloze.launch.checkpoint.deepspeed_files import ALLOWED_CLASSES, load_pickled
from cloze.launch.checkpoint.manager import CheckpointManager, checkpoint_steps, read_average, read_weights
from cloze.launch.checkpoint.state import CHECKSUMS, TrainState, damage, read_state

__all__ = [
    "ALLOWED_CLASSES", "CHECKSUMS", "CheckpointManager", "TrainState", "checkpoint_steps", "damage", "load_pickled",
    "read_average", "read_state", "read_weights",
]
