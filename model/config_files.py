"""config.json of a model folder: read, checked, and turned into a BertConfig. Imports no torch, which takes seconds."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloze.model.config import BertConfig, ModelError
from cloze.model.families import BY_TYPE
from cloze.model.families.family import Json

# Bounds of a JSON file: 4 million labels take 64 MB; a configuration is nested 5 deep.
_MOST_BYTES = 64 << 20
_MOST_LEVELS = 64
# Of a tokenizer's file: the largest published tokenizer.json has 33 MB (Gemma 3's).
_MOST_TOKENIZER_BYTES = 1 << 29
OWN_MODEL_TYPE = "cloze"  # model_type in config.json of our own format
FINGERPRINT = "tokenizer_fingerprint"  # entry of config.json of what was fine-tuned here
# What `AutoTokenizer` needs, and what other tools read of the same tokenizer (the `VOCAB_FILES_NAMES` of its classes).
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")
SLOW_TOKENIZER_FILES = (
    *("vocab.json", "merges.txt", "added_tokens.json"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model"),
)
SEGMENTS = "segment_embeddings"  # false in config.json: the only segment's embedding is zero, as without segments


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file.

    Raises:
        ModelError: it is anything but a regular file of bounded size and depth that holds one object.
    """
    expected = "expected a model folder, as cloze export makes"
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: found no regular file, {expected}")
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ModelError(f"{path}: found {size:,} bytes, expected at most {_MOST_BYTES:,}; fetch the model again")
        values = json.loads(text := path.read_text(encoding="utf-8"))
        if "\\ud" in text.lower():  # half of a character, which no file takes, is a ValueError here
            json.dumps(values, ensure_ascii=False).encode()
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; {expected}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: found {type(values).__name__}, expected an object; fetch or export the model again")
    if not _is_shallow(values):
        raise ModelError(f"{path}: found values nested more than {_MOST_LEVELS} deep; fetch or export the model again")
    return values


def copy_tokenizer_file(path: Path, target: Path) -> None:
    """Copy a file of a tokenizer.

    Raises:
        ModelError: it is larger than any, and would only fill the disk.
    """
    if (size := path.stat().st_size) > _MOST_TOKENIZER_BYTES:
        raise ModelError(
            f"{path}: found {size:,} bytes, expected at most {_MOST_TOKENIZER_BYTES:,}; replace it by the tokenizer's"
        )
    shutil.copyfile(path, target)


def _is_shallow(value: object) -> bool:
    """Whether lists and objects are nested at most _MOST_LEVELS deep."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors that values of wrong types in a config.json cause in its readers into a ModelError, and name the
    folder in those of readers that see the file's content alone.
    """
    try:
        yield
    except ModelError as error:
        if not str(error).startswith("config.json: "):
            raise
        raise ModelError(f"{folder}/{error}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(
            f"{folder / 'config.json'}: found a value of another kind than its field's ({error}); fix "
            "it, or fetch or export the model again"
        ) from error


def read_shape(folder: Path) -> BertConfig:
    """The shape of the model in a folder, by its config.json alone.

    Raises:
        ModelError: for what is missing, damaged or of another architecture.
    """
    with reading(folder):
        return shape_of(read_object(folder / "config.json"))


def shape_of(values: Json) -> BertConfig:
    """The same from its fields."""
    config = config_from_huggingface(values)
    return dataclasses.replace(config, type_vocab_size=0) if values.get(SEGMENTS) is False else config


def config_from_huggingface(values: Json) -> BertConfig:
    """BertConfig from the content of a config.json.

    Raises:
        ModelError: for unsupported architectures.
    """
    _check_unquantized(values)
    kind = values.get("model_type")
    if kind == OWN_MODEL_TYPE:
        known = {field.name for field in dataclasses.fields(BertConfig)}
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    if not isinstance(kind, str) or kind not in BY_TYPE:
        raise ModelError(f"config.json: found model_type {kind!r}, expected {', '.join(BY_TYPE)} or {OWN_MODEL_TYPE}")
    return BY_TYPE[kind].read(values)


def _check_unquantized(values: Json) -> None:
    """Raise ModelError for a config.json whose weights are to be read as codes of a method, or are to be quantized when
    they are loaded; `bitsandbytes` with neither of its formats does nothing.
    """
    for field in ("quantization_config", "compression_config"):  # the second is llm-compressor's name
        given = values.get(field)
        method = given.get("quant_method") if isinstance(given, dict) else None
        if not given or (method == "bitsandbytes" and not (given.get("load_in_8bit") or given.get("load_in_4bit"))):
            continue
        raise ModelError(
            f"config.json: found {field} with quant_method {method!r}, expected none: quantised models cannot be read; "
            "take the model as it was trained"
        )
