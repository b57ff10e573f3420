"""What sentence-transformers writes beside a model: how it makes a text's vector of those of the tokens.

modules.json lists modules in their order, each with its folder: a Transformer, a Pooling, perhaps a Normalize. Before
version 6 a Pooling has a field of true or false for each mode (`pooling_mode_cls_token`), since then the mode's name.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloze.launch.texts.settings import Vectors
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import read_json

MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
# The settings of a Transformer: of these names, which it had in old versions, the first one that is there counts.
_FAMILIES = "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"
LENGTHS = [f"sentence_{family}_config.json" for family in _FAMILIES]
SETTINGS = "config_sentence_transformers.json"  # of all modules together, such as prompts
# Of the folders with the configuration of a module; its weights, as of a Dense, are not read.
MODULE_CONFIGS = "[0-9]*/config.json"
_MODES = {  # those that are computed here, with their fields before version 6
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
}
# Settings of a Transformer that are arguments of its parts, by their names in several versions.
_ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "processing_kwargs",
    "config_args",
    "config_kwargs",
)


def write_modules(folder: Path, vectors: Vectors, width: int, max_length: int) -> None:
    """Write the files with which any version makes the same vectors.

    Args:
        width: size of the vectors.
        max_length: tokens at which a text is truncated, special ones included.
    """
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] * vectors.normalize)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    modes = {name: vectors.pooling == ours for ours, name in _MODES.items()}
    (folder / "1_Pooling").mkdir()
    _write(folder / MODULES, modules)
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": width} | modes)
    write_length(folder, max_length)


def write_length(folder: Path, max_length: int) -> None:
    """Write the file with the tokens at which a text is truncated, special ones included."""
    _write(folder / LENGTH, {"max_seq_length": max_length, "do_lower_case": False})


def read_pooling(folder: Path, warn: Callable[[str], None]) -> Vectors | None:
    """The pooling of a folder's model; None: sentence-transformers has written nothing there, or what is not computed
    here, of which is warned.

    Raises:
        UserError: a file is damaged.
    """
    inside, folder = folder, folder_of_modules(folder) or folder
    if not (folder / MODULES).is_file():
        return None
    modules, kinds = _modules(folder)
    if inside == folder and (transformer := transformer_folder(folder)):
        raise UserError(f"{folder / MODULES}: found the Transformer in {transformer.name}/; give {transformer}")
    if not any("Pooling" in kind for kind in kinds):  # of a cross-encoder, which makes no vectors
        if _read_transformer(inside)[1].get("module_output_name") == "sentence_embedding":
            warn(_not_computed(folder / MODULES, "the model's own pooler"))
        return None
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        warn(_not_computed(folder / MODULES, ", ".join(kinds)))
        return None
    path = modules[1].get("path")
    if not isinstance(path, str) or str(Path(path)) != Path(path).name:
        raise UserError(
            f"{folder / MODULES}: found the path {path!r}, expected a folder beside it; fetch the model again"
        )
    config = _read(folder / path / "config.json", dict)
    poolings = _poolings(config)
    if len(poolings) != 1 or poolings[0] not in _MODES or config.get("include_prompt") is False:
        shown = ", ".join(poolings) + (" without the prompt" if config.get("include_prompt") is False else "")
        warn(_not_computed(folder / path / "config.json", shown or "no pooling"))
        return None
    _warn_of_others(folder, inside, warn)
    return Vectors(poolings[0], normalize=kinds[2:] == ["Normalize"])  # type: ignore[arg-type]  # it is one of them


def folder_of_modules(folder: Path) -> Path | None:
    """The folder whose modules.json says what is done with a model's vectors: the model's, or, of old versions, the one
    above, if it names this one as that of the Transformer; None: sentence-transformers has written none.

    Raises:
        UserError: the file above is damaged.
    """
    if (folder / MODULES).is_file():
        return folder
    for place in (Path(os.path.abspath(folder)), folder.resolve()):  # as it is named, and where links lead
        try:
            transformer = transformer_folder(place.parent)
        except UserError:  # another program's file of this name, unless the folder's is the library's, as 0_Transformer
            if place.name.partition("_")[0].isdigit():
                raise
            continue
        if transformer and transformer.name == place.name:
            return place.parent
    return None


def transformer_folder(folder: Path) -> Path | None:
    """The folder of the Transformer, where modules.json names another one than its own.

    Raises:
        UserError: the file is damaged.
    """
    if not (folder / MODULES).is_file():
        return None
    modules, kinds = _modules(folder)
    path = modules[0].get("path") if kinds[:1] == ["Transformer"] else None
    if path is None or isinstance(path, str) and Path(path) == Path():
        return None
    if not isinstance(path, str) or len(Path(path).parts) > 1 or Path(path).name in ("", ".."):
        raise UserError(
            f"{folder / MODULES}: found the path {path!r:.60}, expected a folder beside it; fetch the model again"
        )
    return folder / path


def _modules(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What modules.json lists, and the kind of each. Raises UserError if it is damaged."""
    modules = _read(folder / MODULES, list)
    if not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in modules):
        raise UserError(f"{folder / MODULES}: found no types of modules, expected them; fetch the model again")
    return modules, [each["type"].rpartition(".")[2] for each in modules]


def _warn_of_others(folder: Path, inside: Path, warn: Callable[[str], None]) -> None:
    """Warn of what sentence-transformers does to a text before its tokenizer, to the arguments of its parts and to a
    vector, and Cloze does not.
    """
    settings = _read(folder / SETTINGS, dict) if (folder / SETTINGS).is_file() else {}
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if isinstance(name, str) and isinstance(prompts, dict):
        name = prompts.get(name)
    if name:
        warn(
            f"{folder / SETTINGS}: found the default prompt {str(name)[:60]!r}, which sentence-transformers puts "
            "before each text and Cloze does not, nor what reads an export: write it there"
        )
    if size := settings.get("truncate_dim"):
        warn(
            f"{folder / SETTINGS}: found truncate_dim {size!r:.60}: of each vector sentence-transformers gives so many "
            "numbers, the first ones, and Cloze and what reads an export all; --dimensions keeps some, made of length 1"
        )
    path, transformer = _read_transformer(inside)
    if transformer.get("do_lower_case") is True:
        warn(
            f"{path}: found do_lower_case true, by which sentence-transformers makes texts lower case "
            "and Cloze does not: give them so"
        )
    if (output := _output_of(transformer)) is not None:
        warn(
            f"{path}: found {output}, expected the last hidden states, of which Cloze and what reads an export make "
            "vectors"
        )
    if given := [name for name in _ARGUMENTS if transformer.get(name)]:
        warn(
            f"{path}: found {', '.join(given)}, by which sentence-transformers calls the model or its tokenizer "
            "otherwise, and Cloze and what reads an export do not"
        )


def _output_of(transformer: dict[str, Any]) -> str | None:
    """What the vectors are made of by the settings of version 6, unless it is the last hidden states."""
    task = transformer.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        return f"transformer_task {str(task)[:60]!r}"
    kinds = transformer.get("modality_config")
    of_text = kinds.get("text") if isinstance(kinds, dict) else None
    if not isinstance(of_text, dict):
        return None
    if of_text.get("method") not in (None, "forward"):
        return f"method {str(of_text['method'])[:60]!r}"
    output = of_text.get("method_output_name")
    return None if output in (None, "last_hidden_state") else f"method_output_name {json.dumps(output)[:60]}"


def read_max_length(folder: Path) -> int | None:
    """Tokens at which sentence-transformers truncates a text, special ones included; None: not said.

    Raises:
        UserError: a file is damaged.
    """
    path, transformer = _read_transformer(folder)
    length = transformer.get("max_seq_length")
    if length is not None and not _is_length(length):
        raise UserError(
            f"{path}: max_seq_length: found {length!r:.60}, expected a whole number of at least 3; fetch the model "
            "again"
        )
    others = folder / "tokenizer_config.json"
    if length is None and folder_of_modules(folder) and others.is_file():  # since version 6
        length = _read(others, dict).get("model_max_length")
    return length if _is_length(length) else None


def _is_length(length: object) -> bool:
    return type(length) is int and length >= 3  # a text has a token at least


def _read_transformer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The settings of a Transformer, and their file; without one, none. An empty object counts as none."""
    for path in (folder / name for name in LENGTHS):
        if path.is_file() and (settings := _read(path, dict)):
            return path, settings
    return folder / LENGTH, {}


def _poolings(config: dict[str, Any]) -> list[str]:
    """The names of modes; those that are not computed here as the file has them."""
    named = config.get("pooling_mode")
    if named is not None:
        return [str(each) for each in (named if isinstance(named, list) else [named])]
    ours = {theirs: name for name, theirs in _MODES.items()}
    return [ours.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on is True]


def _not_computed(path: Path, found: str) -> str:
    return (
        f"{path}: found {found:.100}, expected a pooling of {', '.join(_MODES)}, and a Normalize at most: vectors "
        "are not those of sentence-transformers, but the mean over the tokens, or what --pooling names"
    )


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read(path: Path, kind: type) -> Any:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as JSON ({error}); fetch the model again") from error
    if not isinstance(content, kind):
        raise UserError(f"{path}: found {type(content).__name__}, expected {kind.__name__}; fetch the model again")
    return content
