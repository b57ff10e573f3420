"""The operation of `cloze predict MODEL ...` where none is named: that of the model's head."""

from __future__ import annotations

from cloze.launch.predict.precheck import named_model
from cloze.launch.pretrained.finding import model_path
from cloze.launch.run import runs
from cloze.model.tasks import saved_class

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
    folder = model_path(named_model(words))
    runs.check_holds_model(folder)
    if runs.is_pretraining(folder):
        # What ELECTRA's discriminator says of tokens is for its training alone.
        return "embed" if runs.fields_of(folder).get("objective") == "replaced_tokens" else "fill-mask"
    return _OPERATIONS.get(saved_class(runs.model_folder(folder)).__name__, "embed")
