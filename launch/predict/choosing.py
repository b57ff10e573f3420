"""Which operation `cloze predict MODEL ...` stands for: the one that the model's head is for."""

from __future__ import annotations

from dataclasses import fields

import yaml

from cloze.launch.config.model import ModelConfig
from cloze.launch.parsing import words_first
from cloze.launch.pretrained.loading import model_path
from cloze.launch.run import runs
from cloze.model.tasks import saved_class
from cloze.pipeline.errors import UserError

_OPERATIONS = {
    "BertForPreTraining": "fill-mask", "BertForMaskedLM": "fill-mask", "BertForSequenceClassification": "classify",
    "BertForTokenClassification": "tag", "BertForQuestionAnswering": "answer", "BertForMultipleChoice": "choose",
}


def operation_for(words: list[str]) -> str:
    """The operation that the head of a model is for; embed for a bare encoder.

    Args:
        words: of the command line, behind `predict`: the model, texts, options.

    Raises:
        UserError, ModelError: there is no model among them, or it is none.
    """
    ordered = words_first(words)
    if not ordered or ordered[0].startswith("--"):
        raise UserError("cloze predict: found no model, expected its folder or name behind `predict`, or an operation: "
                        "see cloze predict --help")
    folder = model_path(ModelConfig(ordered[0], **_options(ordered)))
    runs.check_holds_model(folder)
    if runs.is_pretraining(folder):
        # What ELECTRA's discriminator says of tokens is for its training alone.
        return "embed" if runs.fields_of(folder).get("objective") == "replaced_tokens" else "fill-mask"
    return _OPERATIONS.get(saved_class(runs.model_folder(folder)).__name__, "embed")


def _options(words: list[str]) -> dict:
    """Where the model comes from, as the options say; what is wrong in them is said by who parses them all."""
    found = {}
    for number, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in {field.name for field in fields(ModelConfig)} - {"model"}:
            found[name] = yaml.safe_load(value if equals else words[number + 1] if number + 1 < len(words) else "null")
    return found
