"""The files of a checkpoint as DeepSpeed asks for them: their content is handed to functions of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

Content = dict[str, Any]
"""Tensors and plain values by name."""
Submit = Callable[[Content, Path], None]
"""Takes the content of a file, live tensors of the engine included, and its path."""
Read = Callable[[str], Content]
"""Returns the content of a file."""


class CheckpointFiles(CheckpointEngine):
    """DeepSpeed's interface for writing and reading files, over two functions."""

    def __init__(self, submit: Submit | None = None, read: Read | None = None) -> None:
        super().__init__()
        self.name = "cloze"
        self._submit, self._read = submit, read
        self.content: Content = {}
        """Of the file that was read last."""

    def create(self, info: object) -> None:
        """Does nothing: there is nothing to prepare."""

    def save(self, state_dict: Content, path: str) -> None:
        assert self._submit is not None, "made for reading"
        partition = state_dict.get("optimizer_state_dict")
        if isinstance(partition, dict) and "partition_count" in partition:
            # BF16_Optimizer, which DeepSpeed uses for bf16 at stage 1, omits this entry, which DeepSpeed's own tools
            # need.
            partition.setdefault("zero_stage", 1)
        self._submit(state_dict, Path(path))

    def load(self, path: str, map_location: object = None) -> Content:
        assert self._read is not None, "made for writing"
        self.content = self._read(path)
        return self.content

    def commit(self, info: object) -> bool:
        return True
