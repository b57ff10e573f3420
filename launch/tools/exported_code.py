"""Exports of models that transformers lacks: the code beside the weights, with which transformers loads them.

It is the model floor itself, which imports torch alone: each file as `cloze_NAME.py`, whose imports name its
neighbours, and two files that give it the inputs and outputs of transformers (`remote_code/`).
"""

import json
import re
from pathlib import Path

import cloze.model
from cloze.model.config_files import OWN_MODEL_TYPE
from cloze.model.huggingface import load_note, load_pretrained
from cloze.model.tasks import saved_class
from cloze.version import __version__

_TEMPLATES = Path(__file__).parent / "remote_code"
_FLOOR = Path(cloze.model.__file__).parent
_IMPORTS = re.compile(r"^from cloze\.model\.([\w.]+) import", re.MULTILINE)
# Our class -> the ending of those of transformers that its folders load as, beside AutoModel.
_HEADS = {
    "BertForPreTraining": "ForMaskedLM",
    "BertForMaskedLM": "ForMaskedLM",
    "BertForNextSentencePrediction": "ForNextSentencePrediction",
    "BertForSequenceClassification": "ForSequenceClassification",
    "BertForTokenClassification": "ForTokenClassification",
    "BertForMultipleChoice": "ForMultipleChoice",
    "BertForQuestionAnswering": "ForQuestionAnswering",
}


def _parts() -> list[str]:
    """Files of model/ that its classes import, without their ending; those of families all."""
    found, waiting = set(), ["tasks", *(f"families/{path.stem}" for path in _FLOOR.glob("families/*.py"))]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        imported = _IMPORTS.findall((_FLOOR / f"{name}.py").read_text(encoding="utf-8"))
        waiting += [part.replace(".", "/") for part in imported if part != "families"]
    return sorted(found)


def write_remote_code(folder: Path) -> None:
    """Add the code with which transformers loads it to a model folder in our own format; other folders need none."""
    if load_note(folder, "model_type") != OWN_MODEL_TYPE:
        return
    for name in _parts():
        text = (_FLOOR / f"{name}.py").read_text(encoding="utf-8")
        text = _IMPORTS.sub(lambda match: f"from .{_beside(match[1])} import", text)
        _write(folder / f"{_beside(name)}.py", text, f"model/{name}.py")
    for path in sorted(_TEMPLATES.glob("*.in")):
        _write(folder / path.stem, path.read_text(encoding="utf-8"), f"launch/tools/remote_code/{path.name}")
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    _, weights = load_pretrained(folder)
    values["cloze_pooler"] = any(name.startswith("bert.pooler.") for name in weights)
    endings = ["", *filter(None, [_HEADS.get(saved_class(folder).__name__)])]
    values["auto_map"] = {"AutoConfig": "configuration_cloze.ClozeConfig"} | {
        f"AutoModel{ending}": f"modeling_cloze.Cloze{ending or 'Model'}" for ending in endings
    }
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _beside(name: str) -> str:
    """Name of a module of model/ among an export's files, which are in one folder."""
    return "cloze_" + name.replace("/", "_").replace(".", "_").removesuffix("___init__")


def _write(path: Path, text: str, source: str) -> None:
    path.write_text(f"# Of Cloze {__version__}, {source}; Apache License 2.0.\n{text}", encoding="utf-8")
