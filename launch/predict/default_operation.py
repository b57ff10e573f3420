"""The operation of `cloze predict MODEL ...` where none is named: that of the model's head."""

from cloze.launch.predict.precheck import named_model
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.pretrained.finding import model_path
from cloze.launch.run import runs
from cloze.model.tasks import saved_class


def operation_for(words: list[str]) -> str:
    """The operation for the head of a model; embed for an encoder without a head.

    Args:
        words: words after `predict` on the command line: the model, texts, options.

    Raises:
        UserError, ModelError: the words name no model, or it can't be read.
    """
    folder = model_path(named_model(words))
    runs.check_holds_model(folder)
    if runs.is_pretraining(folder):
        # The outputs of ELECTRA's discriminator are for its training only.
        return "embed" if runs.fields_of(folder).get("objective") == "replaced_tokens" else "fill-mask"
    model = saved_class(runs.model_folder(folder)).__name__
    return next((name for name, entry in OPERATIONS.items() if model in entry.models), "embed")
