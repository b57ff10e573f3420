"""A model as an ONNX graph: any batch and length, checked in onnxruntime before it is published."""

import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cloze.launch.pretrained.loading import load_settings, load_truncation, load_vectors
from cloze.launch.texts.settings import Answering
from cloze.launch.texts.settings import described as as_note
from cloze.model.huggingface import InFolders
from cloze.model.tasks import saved_class
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install

GRAPH, DESCRIPTION = "model.onnx", "onnx.json"

# Names of the outputs of each architecture, as in transformers.
_OUTPUTS = {
    "BertModel": {"last_hidden_state": "last_hidden_state", "pooled_output": "pooler_output"},
    "BertForPreTraining": {"prediction_logits": "prediction_logits", "next_sentence_logits": "seq_relationship_logits"},
    "BertForMaskedLM": {"prediction_logits": "logits"},
    "BertForNextSentencePrediction": {"next_sentence_logits": "logits"},
    "BertForQuestionAnswering": {"start_logits": "start_logits", "end_logits": "end_logits"},
    **dict.fromkeys(
        (
            "BertForReplacedTokenDetection",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BertForMultipleChoice",
        ),
        {"logits": "logits"},
    ),
}
_MEANINGS = {
    "input_ids": "token ids, [CLS] and [SEP] included; padding may be any id",
    "attention_mask": "1 for tokens, 0 for padding, which stands at the end",
    "token_type_ids": "{} up to the first [SEP], then {}",
}
_TOLERANCE = 1e-4  # tolerance of the check; the order of sums differs between torch and onnxruntime


class _Padded(nn.Module):
    """A model with padded tensors as inputs and a tuple of tensors as output."""

    model: InFolders

    def __init__(self, model: InFolders) -> None:
        super().__init__()
        self.model = model
        self.names = _OUTPUTS[type(model).__name__]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return tuple(tensor for name in self.names if (tensor := getattr(output, name)) is not None)


def check_installed() -> None:
    """Raise UserError if the libraries of the extra are missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"onnx: found no {error.name}, expected the packages that write and run such graphs; "
            f"{how_to_install('onnx')}"
        ) from None


def write_onnx(folder: Path) -> None:
    """Write model.onnx and onnx.json (inputs, outputs, truncation of texts, decoding of answers) into a model folder.

    Batch size, length and number of choices are dynamic. First the outputs of onnxruntime for a batch of unequal
    lengths are compared with torch's.

    Raises:
        UserError: the extra is missing, or the outputs differ.
        ModelError: the model's class is not supported.
    """
    check_installed()
    cls = saved_class(folder)
    # What torch has an operator for, the graph has one for: eager's products do not wait for a fill of their output.
    model = _Padded(cls.from_folder(folder, attention_kernel="sdpa"))
    model.eval()
    if (head := getattr(model.model, "head", None)) and head.pieces != "none":
        raise UserError(
            f"onnx: found a model that reads long texts in pieces (pooled by {head.pieces}), expected one "
            "that reads one sequence; fine-tune it with --keep head, tail or head_tail"
        )
    inputs = _sample(model.model, batch=2, length=7)
    axes = ("batch", "choices", "length") if inputs["input_ids"].dim() == 3 else ("batch", "length")
    longest = model.model.config.max_position_embeddings
    dims = [torch.export.Dim(name, **({"max": longest} if name == "length" else {})) for name in axes]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that it could have used
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of the exporter about itself
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            dynamo=True,
            verbose=False,
            external_data=False,
            output_names=_names(model, inputs),
            dynamic_shapes={name: dict(enumerate(dims)) for name in inputs},
        )
        assert program is not None, "the exporter of dynamo returns it"
        program.save(folder / GRAPH)
    shapes = _check(folder / GRAPH, model)
    segments = model.model.config.segments
    described = {
        "inputs": {
            name: {"dtype": "int64", "shape": list(axes), "meaning": _MEANINGS[name].format(*segments)}
            for name in inputs
        },
        "outputs": {name: {"dtype": "float32", "shape": shape} for name, shape in shapes.items()},
        "max_length": longest,
        "architecture": cls.__name__,
    }
    if answering := load_settings(folder, Answering):
        described |= {"max_length": answering.max_length, "answering": asdict(answering)}
    elif (truncation := load_truncation(folder, model.model.config)) and cls.__name__ == "BertForTokenClassification":
        # A tagger cuts no text: it splits between words.
        described |= {name: value for name, value in as_note(truncation).items() if name in ("max_length", "words")}
    elif truncation:
        described["truncation"] = as_note(truncation)
    if "last_hidden_state" in shapes and (vectors := load_vectors(folder)):  # how it is pooled
        described["vectors"] = asdict(vectors)
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _sample(model: InFolders, batch: int, length: int) -> dict[str, Tensor]:
    """Inputs of unequal lengths, padded."""
    shape = (batch, 3, length) if type(model).__name__ == "BertForMultipleChoice" else (batch, length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    lengths = torch.randint(length // 2, length + 1, shape[:-1], generator=generator)
    places = torch.arange(length).expand(shape)
    inputs = {"input_ids": ids, "attention_mask": (places < lengths[..., None]).long()}
    if model.config.type_vocab_size > 1:
        inputs["token_type_ids"] = torch.tensor(model.config.segments)[(places >= lengths[..., None] // 2).long()]
    return inputs


def _names(model: _Padded, inputs: dict[str, Tensor]) -> list[str]:
    output = model.model(**inputs)
    return [theirs for ours, theirs in model.names.items() if getattr(output, ours) is not None]


def _check(path: Path, model: _Padded) -> dict[str, list[int | str]]:
    """Compare onnxruntime with torch on another batch and length.

    Returns:
        The shapes of the outputs by name.

    Raises:
        UserError: an output differs.
    """
    import onnxruntime

    inputs = _sample(model.model, batch=3, length=min(11, model.model.config.max_position_embeddings))
    seen = inputs["attention_mask"].bool()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.inference_mode():
        expected = model(**inputs)
    shapes = {}
    for output, ours, theirs in zip(session.get_outputs(), outputs, expected, strict=True):
        theirs = theirs.numpy()
        if theirs.shape[: seen.dim()] == tuple(seen.shape):  # of tokens: outputs at padding are not used
            ours, theirs = ours[seen.numpy()], theirs[seen.numpy()]
        difference = np.abs(ours - theirs).max()
        if not difference <= _TOLERANCE:
            raise UserError(
                f"onnx: found {output.name} to differ by {difference:.2g} between onnxruntime "
                f"{onnxruntime.__version__} and torch, expected at most {_TOLERANCE}; try another version"
            )
        shapes[output.name] = output.shape
    return shapes
