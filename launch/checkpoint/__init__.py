"""Checkpoints: their state, their files, and the folder of a run that contains them."""

from cloze.launch.checkpoint.deepspeed_files import ALLOWED_CLASSES, known_content, load_pickled
from cloze.launch.checkpoint.fetching import fetch_run
from cloze.launch.checkpoint.manager import (
    CheckpointManager,
    checkpoint_steps,
    damage_by_sizes,
    read_average,
    read_weights,
)
from cloze.launch.checkpoint.shared_reading import read_once
from cloze.launch.checkpoint.state import CHECKSUMS, TrainState, damage, read_state
from cloze.launch.checkpoint.stored_checkpoints import StoredCheckpoints

__all__ = [
    "ALLOWED_CLASSES",
    "CHECKSUMS",
    "CheckpointManager",
    "StoredCheckpoints",
    "TrainState",
    "checkpoint_steps",
    "damage",
    "damage_by_sizes",
    "fetch_run",
    "known_content",
    "load_pickled",
    "read_average",
    "read_once",
    "read_state",
    "read_weights",
]
