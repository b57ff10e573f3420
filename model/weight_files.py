"""Reads the files of a model's folder, which may be damaged or made to harm: JSON, weights in one file or in shards."""

import hashlib
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cloze.model.config import ModelError
from cloze.model.config_files import read_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights that transformers has split: names of weights -> names of files
OLD_WEIGHTS = "pytorch_model.bin"

_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDICES = ("position_ids", "token_type_ids")  # whole numbers beside the weights in old folders


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a model folder as they are: of model.safetensors, else of the shards that its index names, else of
    an old pytorch_model.bin, read with weights_only.

    Raises:
        ModelError: there are none, they are damaged, or they are no floating-point numbers.
    """
    path, old = folder / WEIGHTS, folder / OLD_WEIGHTS
    try:
        for each in (path, folder / INDEX):  # a link to a file that is gone is no reason to take others
            if os.path.lexists(each) and not each.is_file():
                raise ModelError(f"{each}: found no regular file, expected one; restore or remove it")
        if path.is_file():
            weights = load_file(path)
        elif (folder / INDEX).is_file():
            weights = _read_shards(folder)
        elif old.is_file():
            weights = _read_old_weights(old)
        else:
            raise ModelError(f"{folder}: found neither {WEIGHTS} nor {INDEX} nor {OLD_WEIGHTS}")
    except (OSError, RuntimeError, SafetensorError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder}: the weights cannot be read ({reason}); fetch or export them again") from None
    _check_numbers(weights, folder)
    return weights


def name_of(kind: torch.dtype | torch.layout) -> str:
    """The name of a type of numbers, such as bfloat16, or of a layout."""
    return str(kind).removeprefix("torch.")


def hash_of(weights: dict[str, Tensor], beside: str = "") -> str:
    """SHA-256 of weights with their names, types and shapes.

    Args:
        beside: text that is hashed before them.
    """
    digest = hashlib.sha256(beside.encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shard_names(folder: Path) -> dict[str, set[str]]:
    """The names of the weights in each of a folder's shards, as the index has them.

    Raises:
        ModelError: the index is damaged, or names a file outside the folder.
    """
    path = folder / INDEX
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{path}: found no weight_map, expected the file of each weight; fetch the model again")
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise ModelError(
                f"{path}: weight_map: found {str(file)[:60]!r} for {name}, expected a *.safetensors file of the folder"
            )
        found.setdefault(file, set()).add(name)
    return found


def _read_shards(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file, expected in sorted(shard_names(folder).items()):
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file}: not found, expected a file that {INDEX} names; fetch the model again")
        shard = load_file(folder / file)
        if wrong := sorted(shard.keys() ^ expected):
            there = "found" if wrong[0] in shard else "missing"
            raise ModelError(
                f"{folder / file}: {wrong[0]} is {there}, unlike in {INDEX} ({len(wrong)} such names); fetch the model "
                "again"
            )
        weights |= shard
    return weights


def has_compressed_records(file: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether records of a file of torch.save are compressed, as torch writes none: a small one could take all memory.
    False for another file, of which torch says what it is.

    Raises:
        ModelError: it is one whose list of records is damaged, of which torch might still read some.
    """
    try:
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            return any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error) as error:
        raise ModelError(
            f"{file}: found a damaged list of records ({error}), expected a file of torch.save; restore or fetch it "
            "again"
        ) from error


def _read_old_weights(path: Path) -> dict[str, Tensor]:
    if has_compressed_records(path):
        raise ModelError(f"{path}: found compressed tensors, expected them as torch.save writes them; fetch it again")
    try:
        weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return weights
    except OSError:
        raise
    except Exception as error:  # any error of the reader for a file that is not an archive of tensors
        raise ModelError(
            f"{path}: refused, it is damaged or holds more than weights ({type(error).__name__}); convert it to "
            "safetensors"
        ) from None


def _check_numbers(weights: Any, folder: Path) -> None:
    """Check that these are floating-point numbers by name. Whole numbers are quantised weights, whose scales are
    elsewhere: read as weights they are a model that predicts noise.
    """
    if not isinstance(weights, dict):
        raise ModelError(f"{folder}: found weights without names, expected those of a model")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{folder}: found {str(name)[:60]!r} that is no tensor, expected weights; convert the model"
            )
        odd = "nested" if tensor.is_nested else "negated" if tensor.is_neg() else None
        if odd or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            kind = odd or name_of(tensor.layout)
            raise ModelError(
                f"{folder}: found {name}, a {kind} tensor on the device {tensor.device.type}, expected a plain one in "
                "memory; take the model as it was trained"
            )
        if tensor.dtype not in _NUMBERS and not name.endswith(_INDICES):
            raise ModelError(
                f"{folder}: found {name} of {name_of(tensor.dtype)}, expected floating-point numbers (fp32, bf16, "
                "fp16, fp64): quantised weights cannot be read; take the model as it was trained"
            )
        # A pickle can claim any shape for one number; finding that the numbers are finite would take forever.
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ModelError(f"{folder}: found {name} with fewer numbers than its shape has; fetch the model again")
