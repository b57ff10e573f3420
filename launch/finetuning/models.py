"""Where a fine-tuned model starts: a Cloze run, a Hugging Face folder or hub name, or random weights of a shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import nn

from launch import runs
from launch.config import FinetuneConfig
from launch.hub import fetch_model, is_name
from model.bert import BertPreTrained
from model.config import BertConfig, HeadConfig
from model.hub import load_architecture, load_head, load_note, load_pretrained
from model.initialization import init_weights
from model.names import StateDict
from pipeline.batches import RankBatch
from pipeline.errors import UserError
from pipeline.tokenizer import Tokenizer

FINGERPRINT = "tokenizer_fingerprint"  # entry of config.json


@dataclass(frozen=True)
class Source:
    """A shape, its weights under our names (empty: random ones), the labels of its head if it has one, the name of the
    class that it is of, where a model folder says it, and the step of its checkpoint, if it is a run of pretraining.
    """

    config: BertConfig
    weights: StateDict
    head: HeadConfig | None
    tokenizer: Tokenizer
    architecture: str | None = None
    step: int | None = None


def find_source(config: FinetuneConfig) -> Source:
    """Read what `--model` and `--tokenizer` name.

    Raises:
        UserError: there is no such model, or the tokenizer is not the one that it was trained with.
    """
    path, architecture, step = Path(config.model), None, None
    if config.model_step is not None and not runs.is_pretraining(path):
        raise UserError(f"model_step: found {config.model_step} with {config.model}, expected null: it is for a run of "
                        "pretraining")
    if path.suffix in (".yaml", ".yml"):
        return _from_shape(config, path)
    if runs.is_pretraining(path):
        from launch.checkpoint import read_weights

        shape, head = runs.model_config(path), None
        step, weights = read_weights(path, config.model_step)
        own_tokenizer, expected = path / runs.TOKENIZER, json.loads((path / runs.DATA).read_text())[FINGERPRINT]
    else:
        path = runs.model_folder(path) if path.is_dir() else _from_hub(config)
        shape, weights = load_pretrained(path)
        head, own_tokenizer, expected = load_head(path), path, load_note(path, FINGERPRINT)
        if load_note(path, "architectures"):  # old folders of BERT name none
            architecture = load_architecture(path)
    tokenizer = Tokenizer.from_folder(config.tokenizer or own_tokenizer)
    has_own = any((own_tokenizer / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
    if expected is None and config.tokenizer and has_own:
        expected = Tokenizer.from_folder(own_tokenizer).fingerprint
    if expected is not None and tokenizer.fingerprint != expected:
        raise UserError(f"tokenizer: found one with fingerprint {tokenizer.fingerprint[:12]} in {tokenizer.folder}, "
                        f"expected {expected[:12]}, the one that {path} was trained with; leave --tokenizer out")
    _check_vocabulary(tokenizer, shape, path)
    return Source(shape, weights, head, tokenizer, architecture, step)


def _from_shape(config: FinetuneConfig, path: Path) -> Source:
    if config.reinitialize_layers:
        raise UserError(f"reinitialize_layers: found {config.reinitialize_layers} with {path}, a shape, whose layers "
                        "are all random, expected 0; leave --reinitialize_layers out")
    if config.tokenizer is None:
        raise UserError(f"tokenizer: found none, expected the folder of one: {path} is a shape without a vocabulary; "
                        "add --tokenizer DIR")
    tokenizer = Tokenizer.from_folder(config.tokenizer)
    known = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"model: {path} can't be read as YAML ({error}); expected a file of configs/model/") from error
    if not isinstance(values, dict) or set(values) - known:
        raise UserError(f"model: found {path} with other fields than a model's, expected a file of configs/model/")
    values["vocab_size"] = values.get("vocab_size") or tokenizer.vocab_size
    try:  # YAML 1.1 reads 1e-5, without a point, as a word
        values |= {field.name: float(values[field.name]) for field in dataclasses.fields(BertConfig)
                   if field.type == "float" and field.name in values}
        shape = BertConfig(**values | {"pad_token_id": tokenizer.special_tokens.pad})
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {path}: found a value of another kind than the field's ({error})") from error
    _check_vocabulary(tokenizer, shape, path)
    return Source(shape, {}, None, tokenizer)


def _check_vocabulary(tokenizer: Tokenizer, shape: BertConfig, path: Path) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(f"tokenizer: found {tokenizer.vocab_size} tokens in {tokenizer.folder}, expected at most "
                        f"{shape.vocab_size}, the vocabulary of {path}; take the tokenizer it was trained with")


def _from_hub(config: FinetuneConfig) -> Path:
    """The folder in which the hub library keeps a model."""
    if not is_name(config.model):
        raise UserError(f"model: found no {config.model}, expected a Cloze run, a Hugging Face folder or hub name, or "
                        "a file of configs/model/")
    return fetch_model(config.model, revision=config.revision, cache_dir=config.cache_dir, offline=config.offline,
                       pickled=config.pickled_weights)


def start_model(cls: type[BertPreTrained], source: Source, head: HeadConfig | None, config: FinetuneConfig
                ) -> tuple[BertPreTrained, str]:
    """The model to train, and one line about where its weights come from. Alike on every process.

    A head is taken over if it is for the same labels, one without labels if it is of the same class; else it is drawn
    from `config.seed`.
    """
    shape = source.config
    if config.dropout is not None:
        shape = dataclasses.replace(shape, hidden_dropout_prob=config.dropout, classifier_dropout=None,
                                    attention_probs_dropout_prob=config.dropout)
    options = {"attention_kernel": config.train.attention_kernel,
               "gradient_checkpointing": config.train.gradient_checkpointing}
    if head is not None:
        options["head"] = head
    if not source.weights:
        model = cls(shape, **options)
        init_weights(model, config.seed)
        return model.train(), "random"
    if head is None:
        same = source.architecture == cls.__name__
    else:
        same = (source.head is not None and source.head.labels == head.labels
                and source.head.problem == head.problem and source.head.layers == head.layers)
    kept = {name: tensor for name, tensor in source.weights.items()
            if same or not name.startswith(("classifier.", "mix."))}
    model = cls.from_weights(shape, kept, config.model, new_head_seed=config.seed, **options)
    drawn = list(model.new_parameters) + reinitialize(model, config.reinitialize_layers, config.seed)
    origin = config.model + (f", step {source.step}" if source.step is not None else "")
    return model.train(), origin + (f"; drawn anew: {', '.join(drawn)}" if drawn else "")


def reinitialize(model: BertPreTrained, num_layers: int, seed: int) -> list[str]:
    """Draw the top layers, and the pooler, from random weights; returns what was drawn. Raises UserError."""
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
    """Keep parts of the encoder from learning, as FinetuneConfig.freeze says. Raises UserError."""
    if what == "none":
        return
    layers = model.bert.encoder.layers
    frozen: list[nn.Module] = [model.bert.embeddings, *layers]
    if what != "encoder":
        top = int(what.removeprefix("below_"))
        if top > len(layers):
            raise UserError(f"freeze: found {what}, expected at most below_{len(layers)}, the model's layers")
        frozen = [model.bert.embeddings, *layers[:len(layers) - top]]
    for module in frozen:
        module.requires_grad_(False)


def unfreezing(stream: Iterator[RankBatch], model: BertPreTrained, step: int, steps_each: int) -> Iterator[RankBatch]:
    """The same batches; before each the top layers learn that are due: one more every `steps_each` steps, none at
    first, the embeddings last (Howard and Ruder 2018, section 3.3). A function of the step alone.
    """
    parts = [*reversed(model.bert.encoder.layers), model.bert.embeddings]
    for number, batch in enumerate(stream, step):
        for place, part in enumerate(parts):
            part.requires_grad_(place < number // steps_each)
        yield batch
