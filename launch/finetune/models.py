"""Builds the model of a fine-tuning from its source, and selects the parameters that are trained."""

import dataclasses
from collections.abc import Iterator

from torch import nn

from cloze.launch.config import FinetuneConfig
from cloze.launch.pretrained.source import Source
from cloze.model.bert import BertPreTrained
from cloze.model.initialization import init_weights
from cloze.model.problems import HeadConfig
from cloze.model.sentence_vectors import SentenceEncoder
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.loading.batches import RankBatch


def start_model(
    cls: type[BertPreTrained], source: Source, head: HeadConfig | None, config: FinetuneConfig
) -> tuple[BertPreTrained, str]:
    """The model to train, the same on every process, and one line about the source of its weights.

    A head is kept if it is for the same labels (without labels: of the same class); else it is initialized from
    `config.seed`.
    """
    # Rates of fine-tuning are those of models whose groups have one rate, as after an export to Hugging Face's format.
    shape = dataclasses.replace(source.config, parametrization="standard")
    if config.dropout is not None:
        shape = dataclasses.replace(
            shape,
            hidden_dropout_prob=config.dropout,
            classifier_dropout=None,
            attention_probs_dropout_prob=config.dropout,
            attention_output_dropout_prob=None,
        )
    options: Fields = {
        "attention_kernel": config.train.attention_kernel,
        "gradient_checkpointing": config.train.gradient_checkpointing,
        **head_options(cls, head, config),
    }
    if not source.weights:
        model = cls(shape, **options)
        init_weights(model, config.seed)
        return model.train(), "random"
    if head is None:
        same = source.architecture == cls.__name__
    else:
        same = (
            source.head is not None
            and source.head.labels == head.labels
            and source.head.problem == head.problem
            and source.head.layers == head.layers
        )
    kept = {
        name: tensor for name, tensor in source.weights.items() if same or not name.startswith(("classifier.", "mix."))
    }
    model = cls.from_weights(shape, kept, config.model, new_head_seed=config.seed, **options)
    drawn = list(model.new_parameters) + reinitialize(model, config.reinitialize_layers, config.seed)
    origin = config.model + (f", step {source.step}" if source.step is not None else "")
    return model.train(), origin + (f"; initialized: {', '.join(drawn)}" if drawn else "")


def head_options(cls: type[BertPreTrained], head: HeadConfig | None, config: FinetuneConfig) -> Fields:
    """Options of the model's class for the head on its encoder."""
    if cls is SentenceEncoder:
        return {"pooling": config.pooling}
    return {} if head is None else {"head": head}


def reinitialize(model: BertPreTrained, num_layers: int, seed: int) -> list[str]:
    """Reinitialize the top layers and the pooler; returns their names for the message.

    Raises:
        UserError: the model has fewer layers.
    """
    if not num_layers:
        return []
    layers = model.bert.encoder.layers
    if num_layers > len(layers):
        raise UserError(f"reinitialize_layers: found {num_layers}, expected at most {len(layers)}, the model's layers")
    chosen = [f"bert.encoder.layers.{number}." for number in range(len(layers) - num_layers, len(layers))]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    init_weights(model, seed)
    anew = (*chosen, "bert.pooler.")
    model.load_state_dict({name: tensor for name, tensor in before.items() if not name.startswith(anew)}, strict=False)
    return [f"the top {num_layers} layers and the pooler"]


def freeze(model: BertPreTrained, what: str) -> None:
    """Freeze parts of the encoder by FinetuneConfig.freeze.

    Raises:
        UserError: the model has fewer layers.
    """
    if what == "none":
        return
    below, layers = _below_layers(model), model.bert.encoder.layers
    top = 0 if what == "encoder" else int(what.removeprefix("below_"))
    if top > len(layers):
        raise UserError(f"freeze: found {what}, expected at most below_{len(layers)}, the model's layers")
    above = _final_norm(model) if top == 0 else []
    for module in (*below, *layers[: len(layers) - top], *above):
        module.requires_grad_(False)


def _final_norm(model: BertPreTrained) -> list[nn.Module]:
    """What stands above the highest layer, in models that have it."""
    norm = getattr(model.bert.encoder, "final_norm", None)
    return [] if norm is None else [norm]


def _below_layers(model: BertPreTrained) -> list[nn.Module]:
    """What the lowest layer stands on: the embeddings, and what all layers read of relative positions."""
    read = (model.bert.relative, getattr(model.bert.encoder, "relative_bias", None))
    return [model.bert.embeddings, *(module for module in read if module is not None)]


def share_of_backward(model: BertPreTrained) -> float:
    """Share of the encoder's layers that a backward goes through: down to the lowest part that learns."""
    layers = model.bert.encoder.layers
    parts = [_below_layers(model), *([layer] for layer in layers)]
    learns = [any(weight.requires_grad for module in part for weight in module.parameters()) for part in parts]
    frozen = learns.index(True) if True in learns else len(parts)
    return min(len(layers), len(parts) - frozen) / len(layers)


def unfreezing(stream: Iterator[RankBatch], model: BertPreTrained, step: int, steps_each: int) -> Iterator[RankBatch]:
    """The same batches. Before each, layers are unfrozen from the top: none at first, one more every `steps_each`
    steps, the embeddings last (Howard and Ruder 2018, section 3.3). A function of the step only.
    """
    layers: list[list[nn.Module]] = [[layer] for layer in reversed(model.bert.encoder.layers)]
    layers[0] += _final_norm(model)
    parts = [*layers, _below_layers(model)]
    for number, batch in enumerate(stream, step):
        for place, part in enumerate(parts):
            for module in part:
                module.requires_grad_(place < number // steps_each)
        yield batch
