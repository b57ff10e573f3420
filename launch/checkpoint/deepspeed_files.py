"""DeepSpeed's files of a checkpoint: reading, whole fp32 weights.

Pickled files are read only here, and only tensors and plain values are loaded from them.
"""

import contextlib
import errno
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
from cloze.launch.checkpoint.writing import replace_tensors
from cloze.launch.engine.content import OtherContent, described, fields_in, has_values, of_file
from cloze.launch.run.runs import RUN
from cloze.launch.system.environment.process import forbid_pickled_code
from cloze.model.weight_files import has_compressed_records
from cloze.pipeline.errors import UserError, reason_of
from cloze.pipeline.fields import Fields

# The file that every rank reads whole at stages 0 to 2: the model, and at stage 0 the optimizer's states.
MODEL_FILE = "mp_rank_00_model_states.pt"
# In each file: the step and the run of the checkpoint that it belongs to, and its name there.
_BELONGS = "belongs_to"

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
        if error.errno == errno.EINVAL:  # a place before the file's beginning, which a cut file leads the reader to
            raise UserError(f"{path}: found a damaged file, expected a checkpoint; it was not loaded") from error
        raise UserError(f"{path}: {error.strerror or error}; fix this, then run the same command again") from error
    except Exception as error:  # torch raises many kinds of errors here, which mean the same to the user
        raise UserError(
            f"{path}: found something other than tensors or a damaged file, expected a checkpoint; it was "
            f"not loaded ({reason_of(error)})"
        ) from error


@contextlib.contextmanager
def known_content(folder: Path) -> Iterator[None]:
    """Turn what was found in a checkpoint that no run writes into a UserError: other names, kinds and shapes of tensors
    and values, in files whose hashes are right. Any other error is ours, and stays what it is.
    """
    try:
        yield
    except OtherContent as error:
        raise UserError(
            f"{folder}: found other content than this run's ({error}), expected what it has saved; remove the folder "
            "to continue from an older checkpoint"
        ) from error


def load_pickled(path: str | Path | IO[bytes], *, in_memory: bool = True) -> Fields:
    """Tensors and plain values of a file that torch.save wrote, on the CPU.

    Args:
        in_memory: false: the tensors' values are read where they are used, each time.

    Raises:
        UserError: the file holds anything else, or is damaged.
    """
    with only_tensors(path):
        if has_compressed_records(path):
            raise UserError(f"{path}: found compressed tensors, expected them as torch.save writes them")
        if not isinstance(path, (str, Path)):
            path.seek(0)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=not in_memory)
        if not isinstance(content, dict):
            raise UserError(f"{path}: found {described(content)}, expected tensors and values by name")
        if not isinstance(path, io.BytesIO):  # in memory: what another process has sent, without the values
            replace_tensors(content, lambda tensor: _check_values(tensor, path))
        return content


def written_by(step: int, run: object, name: str) -> Fields:
    """What each file of a checkpoint holds beside its content: which checkpoint it belongs to, and as which file."""
    return {_BELONGS: {"step": step, RUN: run, "file": name}}


def load_own(path: Path, *, in_memory: bool = True) -> Fields:
    """As `load_pickled`, of a file in a checkpoint's folder.

    Raises:
        UserError: as `load_pickled`; or it belongs to another checkpoint, or is that of another process, which hashes
            that were written anew do not show. Files of earlier versions do not say it.
    """
    content = load_pickled(path, in_memory=in_memory)
    if _BELONGS in content:
        state = read_state(path.parent)
        with known_content(path.parent), of_file(str(path)):
            found, run = fields_in(content[_BELONGS], _BELONGS, ("step", RUN)), state.get(RUN)
            if type(found["step"]) is not int or found["step"] != state["step"]:
                raise OtherContent(f"it is that of step {described(found['step'])}, expected {state['step']}")
            if type(found[RUN]) is not type(run) or found[RUN] != run:
                raise OtherContent("it is another run's")
            if (name := found.get("file", path.name)) != path.name:
                raise OtherContent(f"it was written as {described(name)}")
    return content


def _check_values(tensor: torch.Tensor, path: object) -> torch.Tensor:
    """The tensor, or UserError if it lacks values."""
    if not has_values(tensor):
        raise UserError(f"{path}: found {described(tensor)}, expected all values of each tensor; it was not loaded")
    return tensor


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
    weights = {} if stage == 3 else module_of(load_own(folder / MODEL_FILE))
    if stage:
        for path in folder.glob("*_states.pt"):  # DeepSpeed looks for these names, and reads them itself
            load_own(path, in_memory=False)
        with only_tensors(folder), _silence(), plain_path(folder.parent) as source:
            # At stage 1 DeepSpeed leaves out frozen parameters.
            weights |= get_fp32_state_dict_from_zero_checkpoint(str(source), tag=folder.name)
    return {name: tensor.float() for name, tensor in weights.items()}


def module_of(content: Fields) -> dict[str, torch.Tensor]:
    """The tensors of a file of the model by their names.

    Raises:
        OtherContent: it holds anything else.
    """
    weights = fields_in(fields_in(content, MODEL_FILE, ("module",))["module"], "module")
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise OtherContent(f"module has {name!r:.60}, a tensor whose name is no text")
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
            raise OtherContent(f"module.{name} is {described(tensor)}, expected a tensor of real numbers")
    return weights


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the progress that DeepSpeed's tools print."""
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        yield
