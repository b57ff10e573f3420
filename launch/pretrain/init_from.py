"""`init_from`: starts a run from the weights of another run or of a Hugging Face folder.

A phase is a run of its own, with another sequence length, another learning rate and its own steps from 0; a table shows
what it takes from the source and what starts anew. A resume uses its own checkpoints and does not read the source
again.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from cloze.launch.checkpoint.fetching import fetch_run
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.shared_reading import read_once
from cloze.launch.checkpoint.state import TrainState, checkpoint_steps
from cloze.launch.checkpoint.weights import read_weights
from cloze.launch.config import PretrainConfig
from cloze.launch.config.changes_at_resume import FIXED, marked
from cloze.launch.engine.engine import Engine
from cloze.launch.pretrain.init_vocabulary import OF_TOKENS, NewVocabulary, new_vocabulary
from cloze.launch.pretrain.shapes import OF_VOCABULARY, check_shape, check_source
from cloze.launch.pretrained.loaded import check_vocabulary
from cloze.launch.pretrained.origin import check_tokenizer
from cloze.launch.run import integrity, runs
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.model.config import BertConfig, ModelError
from cloze.model.huggingface import check_finite, check_sizes, load_pretrained
from cloze.model.weight_files import hash_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import clear, readable_errors
from cloze.pipeline.stores.places import StorePath, to_place
from cloze.pipeline.stores.temporary_folders import show_as
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_FETCHED = "step-init_from.tmp"  # beside the checkpoints of the new run, removed by its first save
POSITIONS = "bert.embeddings.position.weight"
_SEGMENTS = "bert.embeddings.segment.weight"
# Fields that determine the optimizer's groups and states, and those that do with another parametrization than standard.
OPTIMIZER_FIELDS = (
    *(name for name in marked(PretrainConfig, FIXED) if name.startswith("optimizer.")),
    "zero.stage",
    "train.precision",
    "model.parametrization",
)
BASE_FIELDS = ("model.base_hidden_size", "model.base_num_layers")


@dataclass(frozen=True)
class InitialWeights:
    """The weights of the model that a run starts from, and what it is."""

    path: Path
    config: BertConfig
    weights: dict[str, torch.Tensor]
    step: int | None
    """Step of the run's checkpoint; None: a Hugging Face folder."""
    name: str
    """As it was given."""
    vocabulary: NewVocabulary | None = None
    """How the run's vocabulary follows from the source's; None: it is the same."""
    hash: str = ""
    """Of all weights that lie there, whichever the run takes."""

    def __str__(self) -> str:
        return self.name if self.step is None else f"step {self.step} of {self.name}"


def bring_source(place: StorePath, checkpoints: CheckpointManager, warn: Callable[[str], None]) -> Path:
    """Fetch a run in a store with its newest good checkpoint, once on each machine; returns its folder. Collective.

    Args:
        checkpoints: checkpoints of the new run, beside which the source is stored until it is loaded.

    Raises:
        UserError: there is no such run, or the store or the disk can't be used.
    """
    folder, device, step = checkpoints.folder / _FETCHED, checkpoints.device, -1

    def fetch(newest: int | None) -> None:
        with readable_errors(folder):
            clear(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            show_as(folder, place)
            fetch_run(place, newest, warn=warn, folder=folder)

    with distributed.together("fetch init_from", folder, device):
        if checkpoints.environment.is_main:
            fetch(None)
            step = max(checkpoint_steps(folder), default=-1)
    step = distributed.from_main(step, device)  # a newer one may have appeared
    with distributed.together("fetch init_from", folder, device):
        if checkpoints.leads and not checkpoints.environment.is_main:
            fetch(None if step < 0 else step)
    return folder


def read_source(
    config: PretrainConfig, path: Path, manifest: Manifest, checkpoints: CheckpointManager
) -> InitialWeights:
    """Configuration and fp32 weights of the source, under our names. Collective.

    Args:
        path: local folder of the source.
        checkpoints: checkpoints of the source, if it is a run.

    Raises:
        UserError: it is neither a run nor a model folder, or damaged, or its vocabulary or shape differs from the new
            run's.
    """
    name = config.init_from or str(path)
    check_source(path)
    newest = checkpoints.agree_on_latest() if runs.is_pretraining(path) else None
    # By one rank, also since the source may still be training: all must take the same step.
    content = read_once(partial(_read, path, newest, checkpoints.warn), path, checkpoints.device)
    shape, weights, folder = BertConfig(**content["shape"]), content["weights"], runs.model_folder(path)
    source = InitialWeights(folder, shape, weights, content["step"], name, hash=hash_of(weights))
    old = Tokenizer.from_folder(integrity.tokenizer_folder(path))
    check_tokenizer(old, folder)
    if old.fingerprint != manifest.tokenizer_fingerprint:
        source = _with_vocabulary(config, source, old, Tokenizer.from_folder(manifest.folder / runs.TOKENIZER))
    if config.init_layers is not None:
        source = _of_layers(source, config.init_layers)
    check_shape(config, source.config, OF_VOCABULARY if source.vocabulary else ())
    return for_student(source, config.model)


def _read(path: Path, newest: int | None, warn: Callable[[str], None]) -> Fields:
    """Shape, fp32 weights and step of a source, those that its objective added included.

    Raises:
        UserError: it is damaged, or another kind of model.
    """
    try:
        if runs.is_pretraining(path):
            step, weights = read_weights(path, newest, warn)
            shape = runs.model_config(path)
            check_finite(weights, f"step {step} of {path}")
        else:
            integrity.check_model(path)
            step, (shape, weights) = None, load_pretrained(runs.model_folder(path))
        check_sizes(shape, weights, str(path))
    except ModelError as error:
        raise UserError(str(error)) from error
    return {"shape": asdict(shape), "weights": weights, "step": step}


def _with_vocabulary(config: PretrainConfig, source: InitialWeights, old: Tokenizer, new: Tokenizer) -> InitialWeights:
    """The source for a run with the tokenizer `new`."""
    vocabulary = new_vocabulary(old, new, config.init_vocabulary)
    if config.init_optimizer:
        raise UserError(
            f"init_optimizer: found true with another vocabulary than that of init_from = {source.name}, expected "
            "moments of the same weights; use --init_optimizer false"
        )
    check_vocabulary(old, source.config, source)
    return replace(source, vocabulary=vocabulary)


def _of_layers(source: InitialWeights, layers: list[int]) -> InitialWeights:
    """The source with only these of its layers, in this order."""
    count = source.config.num_hidden_layers
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise UserError(f"init_layers: found {wrong[0]}, expected 0 to {count - 1}, the layers of {source}")
    prefix = "bert.encoder.layers."
    weights = {name: tensor for name, tensor in source.weights.items() if not name.startswith(prefix)}
    for number, layer in enumerate(layers):
        own = f"{prefix}{layer}."
        weights |= {
            f"{prefix}{number}.{name.removeprefix(own)}": tensor
            for name, tensor in source.weights.items()
            if name.startswith(own)
        }
    return replace(source, config=replace(source.config, num_hidden_layers=len(layers)), weights=weights)


def for_student(source: InitialWeights, shape: BertConfig) -> InitialWeights:
    """The source with what a shape of another family lacks put elsewhere or left out: the vector of the first segment,
    which all tokens of a text have, is added to the positions'; a pooler of another activation is not taken.
    """
    weights, taught = dict(source.weights), source.config
    if taught.type_vocab_size and not shape.type_vocab_size:
        weights[POSITIONS] = weights[POSITIONS] + weights.pop(_SEGMENTS)[taught.segments[0]]
    if taught.pooler_activation != shape.pooler_activation:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("bert.pooler.")}
    return replace(source, weights=weights)


def take_weights(model: nn.Module, source: InitialWeights) -> list[tuple[str, str]]:
    """Copy the source's weights into a newly initialized model; returns rows of a table about what was copied.

    Heads and a pooler that the source lacks keep their initial weights.

    Raises:
        UserError: the source lacks a part of the encoder.
    """
    drawn, taken = [], 0
    parameters = dict(model.named_parameters())  # a tied weight only once, by its first name
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = source.weights.get(name)
            if value is not None and source.vocabulary and name.endswith(OF_TOKENS):
                value = source.vocabulary.rows(value, parameter)
            extended = name == POSITIONS and value is not None and value.shape[1:] == parameter.shape[1:]
            # parameters of another objective
            if value is None or (value.shape != parameter.shape and not (extended and len(value) < len(parameter))):
                if name.startswith("bert.") and ".pooler." not in name:
                    raise UserError(f"init_from: found no {name} in {source}, expected the whole encoder")
                drawn.append(name)
                continue
            parameter[: len(value)].copy_(value)  # the source has fewer rows only if positions are extended
            taken += 1
    rows = [("weights", f"{taken} tensors of {source}"), ("initialized", ", ".join(drawn) or "nothing")]
    if source.vocabulary:
        rows.append(("vocabulary", str(source.vocabulary)))
    changed = [
        f"{field.name} {before} -> {now}"
        for field in fields(BertConfig)
        if (before := getattr(source.config, field.name)) != (now := getattr(model.config, field.name))
    ]
    if changed:
        rows.append(("changed", ", ".join(changed)))
    left = sorted(source.weights.keys() - model.state_dict().keys())
    if left:
        rows.append(("left out", ", ".join(left)))
    if POSITIONS in parameters and len(source.weights[POSITIONS]) < len(parameters[POSITIONS]):
        known = len(source.weights[POSITIONS])
        rows.append(("positions", f"0 to {known - 1} taken, {known} to {len(parameters[POSITIONS]) - 1} drawn"))
    return rows


def check_optimizer(config: PretrainConfig, source: InitialWeights) -> int:
    """The step of the source's optimizer states.

    Raises:
        UserError: unless the new run's optimizer can use them.
    """
    if source.step is None:
        raise UserError(
            f"init_optimizer: found true with init_from = {source.name}, no run of `cloze pretrain`, expected one, "
            "with whose optimizer states the new run can begin; use --init_optimizer false"
        )
    before, now = runs.fields_of(source.path), runs.flatten(asdict(config))
    for name in (*OPTIMIZER_FIELDS, *(BASE_FIELDS if config.model.parametrization != "standard" else ())):
        if before.get(name) != now[name]:
            raise UserError(
                f"{name}: found {now[name]!r}, expected {before.get(name)!r}, that of init_from = "
                f"{source.name}, whose moments init_optimizer asks for; set it to that, or use "
                "--init_optimizer false"
            )
    return source.step


def _check_parameters(model: nn.Module, source: InitialWeights) -> None:
    """Raise UserError unless the source's checkpoint has moments for the model's parameters."""
    for name, parameter in model.named_parameters():
        saved = source.weights.get(name)
        if saved is None or saved.shape != parameter.shape:
            raise UserError(
                f"init_optimizer: found a run that trains {name}, expected the parameters of {source}, "
                "which has none such; give the objective that it had, or --init_optimizer false"
            )


class Start:
    """The start of a new run from `init_from`: the source is read and compared before anything is built, weights are
    taken before the engine is built, moments after. Collective.

    Args:
        checkpoints: checkpoints of the new run.

    Raises:
        UserError: the configuration does not fit the source.
    """

    def __init__(
        self,
        config: PretrainConfig,
        manifest: Manifest,
        checkpoints: CheckpointManager,
        console: Console,
    ) -> None:
        place = to_place(config.init_from or "")  # never empty: a Start is only made if init_from is set
        path = place if isinstance(place, Path) else bring_source(place, checkpoints, console.warn)
        theirs = CheckpointManager(
            path / runs.CHECKPOINTS, checkpoints.environment, checkpoints.device, warn=console.warn, run=checkpoints
        )
        self.source = read_source(config, path, manifest, theirs)
        self.rows: list[tuple[str, str]] = []
        self.moments: CheckpointManager | None = None  # the checkpoints with the moments
        self.elastic = False
        if config.init_optimizer:
            step = check_optimizer(config, self.source)
            self.moments = theirs
            self.elastic = self.moments.is_elastic(step)

    def take(self, model: nn.Module, console: Console) -> None:
        """Copy the source's weights into a newly initialized model. Collective.

        Raises:
            UserError: the source lacks a part of the encoder, or moments of a parameter.
        """
        self.rows = take_weights(model, self.source)
        if self.moments is None:
            return
        _check_parameters(model, self.source)
        if self.elastic and self.source.step is not None:
            console.say(f"{self.source} was saved by another number of processes: converting it")
            self.moments.convert(self.source.step)

    def finish(self, engine: Engine, console: Console) -> TrainState:
        """Load the moments into the engine, and print what was taken and what starts anew.

        Returns:
            The first state.
        """
        moved, state = "none: they start at 0", TrainState()
        if self.moments and self.source.step is not None:
            before, _ = self.moments.load(engine, self.source.step)
            state = TrainState(inherited_steps=before.optimizer_steps)
            moved = f"taken, of {state.inherited_steps} steps"
        console.facts(
            "init_from: initial state of this run",
            [
                *self.rows,
                ("moments", moved),
                ("starting at 0", "step, position in the data, schedule"),
            ],
        )
        return state
