"""DeepSpeed's files of a checkpoint: reading, whole fp32 weights.

Pickled files are read only here, and only tensors and plain values are loaded from them.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from cloze.launch.checkpoint.state import read_state, sharding_stage
from cloze.launch.system import distributed
from cloze.launch.system.environment import forbid_pickled_code
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# The file that every rank reads whole at stages 0 to 2: the model, and at stage 0 the optimizer's states.
MODEL_FILE = "mp_rank_00_model_states.pt"

# The classes besides tensors in DeepSpeed's files. A file with any other class is refused, by our loads and by
# DeepSpeed's, as soon as this module is imported: Python programs are as safe as our commands.
forbid_pickled_code()
ALLOWED_CLASSES = [LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum]
torch.serialization.add_safe_globals(ALLOWED_CLASSES)


@contextlib.contextmanager
def only_tensors(path: object) -> Iterator[None]:
    """Turn torch's error for anything but tensors, plain values and ALLOWED_CLASSES into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; fix this, then run the same command again") from error
    except Exception as error:  # torch raises many kinds of errors here, which mean the same to the user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path}: found something other than tensors or a damaged file, expected a checkpoint; it was "
            f"not loaded ({reason})"
        ) from error


@contextlib.contextmanager
def known_content(folder: Path) -> Iterator[None]:
    """Turn errors of what no run writes into a checkpoint into a UserError: other names, kinds and shapes of tensors
    and values, in files whose hashes are right.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and distributed.lost_others(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UserError(
            f"{folder}: found other content than this run's ({type(error).__name__}: {reason:.200}), expected what it "
            "has saved; remove the folder to continue from an older checkpoint"
        ) from error


def load_pickled(path: str | Path | IO[bytes], *, in_memory: bool = True) -> Fields:
    """Tensors and plain values of a file that torch.save wrote, on the CPU.

    Args:
        in_memory: false: the tensors' values are read where they are used, each time.

    Raises:
        UserError: the file holds anything else, or is damaged.
    """
    with only_tensors(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=not in_memory)


def _is_plain(path: str | Path) -> bool:
    """Whether a path matches only itself as a glob and as a regular expression (apart from its dots, which is
    harmless).
    """
    return re.fullmatch(r"[\w/. -]*", str(path)) is not None


@contextlib.contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """A path of the folder that DeepSpeed can use: its own, or a link to it if the name has brackets, a plus, ...

    DeepSpeed uses paths as globs (engine.py, _get_all_ckpt_names; zero_to_fp32.py, get_checkpoint_files) and as regular
    expressions (ds_to_universal.py, _merge_zero_shards): in `lr[1e-3]` and `a+b` it would find no files.
    """
    if _is_plain(folder):
        yield folder
        return
    parent = None if _is_plain(tempfile.gettempdir()) else "/tmp"
    with tempfile.TemporaryDirectory(prefix="cloze-", dir=parent) as place:
        link = Path(place) / "folder"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Whole fp32 weights of a checkpoint of any ZeRO stage. For use in `known_content`."""
    stage = sharding_stage(read_state(folder))
    # At stage 3 a process has a part of each tensor; below, whole ones, but at stages 1 and 2 in the run's precision.
    weights = {} if stage == 3 else load_pickled(folder / MODEL_FILE)["module"]
    if stage:
        with only_tensors(folder), _silence(), plain_path(folder.parent) as source:
            # At stage 1 DeepSpeed leaves out frozen parameters.
            weights |= get_fp32_state_dict_from_zero_checkpoint(str(source), tag=folder.name)
    if not all(isinstance(name, str) for name in weights):
        raise UserError(
            f"{folder}: found a tensor whose name is no text, expected this run's weights; remove the folder to "
            "continue from an older checkpoint"
        )
    return {name: tensor.float() for name, tensor in weights.items()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the progress that DeepSpeed's tools print."""
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        yield
