"""The source of a fine-tuned model: a Cloze run, a Hugging Face folder or hub name, or random weights of a shape."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.parsing import parse
from cloze.launch.pretrained.finding import fetched_run
from cloze.launch.pretrained.hub import fetch_model
from cloze.launch.pretrained.loaded import check_vocabulary
from cloze.launch.pretrained.loading import load_settings, load_vectors, read_run_weights
from cloze.launch.pretrained.precheck import check_model, named_shape
from cloze.launch.run import as_written, runs
from cloze.launch.system.console import Console
from cloze.launch.texts.settings import Truncation
from cloze.model.config import BertConfig, VectorPooling
from cloze.model.config_files import FINGERPRINT, OWN_MODEL_TYPE
from cloze.model.huggingface import load_architecture, load_head, load_note, load_pretrained
from cloze.model.problems import HeadConfig
from cloze.model.weight_files import hash_of
from cloze.model.weight_names import StateDict
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.tokenization.tokenizer import Tokenizer, holds_tokenizer

REMOTE_CODE = "modeling_cloze.py"  # of an export


@dataclass(frozen=True)
class Source:
    """A model to fine-tune: configuration, weights under our names (empty: random), and, if known, the labels of its
    head, the name of its class, the step of its checkpoint (pretraining run), the maximum length of its training texts,
    and the pooling of its vectors.
    """

    config: BertConfig
    weights: StateDict
    head: HeadConfig | None
    tokenizer: Tokenizer
    architecture: str | None = None
    step: int | None = None
    trained_length: int | None = None
    pooling: VectorPooling | None = None
    folder: Path | None = None
    """The run or model folder; None: a shape alone."""

    @cached_property
    def identity(self) -> str | None:
        """What tells it from another model at its path: of a run of pretraining `runs.identity_of`, else the SHA-256 of
        the configuration and of all weights.
        """
        if self.step is not None and self.folder is not None:
            return runs.identity_of(self.folder)
        return hash_of(self.weights, json.dumps(asdict(self.config), sort_keys=True))


def find_source(config: FinetuneConfig) -> Source:
    """Read `--model` and `--tokenizer`.

    Raises:
        UserError: there is no such model, or it was trained with another tokenizer.
    """
    check_model(config)
    described, architecture, step, length, vectors = named_shape(config.model), None, None, None, None
    stored = fetched_run(config.model, config.model_step) if is_url(config.model) else Path(config.model)
    path = described or stored
    if config.model_step is not None and not runs.is_pretraining(path):
        raise UserError(
            f"model_step: found {config.model_step} with {config.model}, expected null: it is for a run of pretraining"
        )
    if described is not None:
        return _from_shape(config, path)
    if runs.is_pretraining(path):
        shape, head = runs.model_config(path), None
        (step, weights), length = read_run_weights(path, config.model_step, Console().warn), runs.trained_length(path)
        own_tokenizer, expected = as_written.own_tokenizer(path), runs.read_fields(path / runs.DATA).get(FINGERPRINT)
    else:
        as_written.check_model(path)
        path = runs.model_folder(path) if path.is_dir() else fetch_model(config.model, config)
        shape, weights = load_pretrained(path)
        head, own_tokenizer, expected = load_head(path), path, load_note(path, FINGERPRINT)
        if load_note(path, "architectures"):  # old BERT folders do not name a class
            architecture = load_architecture(path)
        if truncation := load_settings(path, Truncation):
            length = truncation.max_length
        vectors = load_vectors(path)
    tokenizer = Tokenizer.from_folder(config.tokenizer or own_tokenizer)
    has_own = holds_tokenizer(own_tokenizer)
    if expected is None and config.tokenizer and has_own:
        expected = Tokenizer.from_folder(own_tokenizer).fingerprint
    if expected is not None and tokenizer.fingerprint != expected:
        raise UserError(
            f"tokenizer: found one with fingerprint {tokenizer.fingerprint[:12]} in {tokenizer.folder}, "
            f"expected {expected!s:.12}, the one that {path} was trained with; leave --tokenizer out"
        )
    check_vocabulary(tokenizer, shape, path)
    pooling = vectors.pooling if vectors else None
    return Source(shape, weights, head, tokenizer, architecture, step, length, pooling, path)


def _from_shape(config: FinetuneConfig, path: Path) -> Source:
    if config.reinitialize_layers:
        raise UserError(
            f"reinitialize_layers: found {config.reinitialize_layers} with {path}, a shape, whose layers "
            "are all random, expected 0; leave --reinitialize_layers out"
        )
    assert config.tokenizer is not None, "check_model asks for it"
    tokenizer = Tokenizer.from_folder(config.tokenizer)
    try:
        shape = parse("pretrain", BertConfig, ["--config", str(path)])  # whose help describes the fields
    except UserError as error:
        raise UserError(f"model: {path}: {str(error).removeprefix('cloze pretrain: ')}") from error
    shape = replace(
        shape, vocab_size=shape.vocab_size or tokenizer.vocab_size, pad_token_id=tokenizer.special_tokens.pad
    )
    check_vocabulary(tokenizer, shape, path)
    return Source(shape, {}, None, tokenizer)


def warn_of_own_format(folder: Path, console: Console) -> None:
    """Warn if transformers cannot load a model folder by itself."""
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == OWN_MODEL_TYPE:
        how = (
            f"transformers loads it with trust_remote_code=True, by the code next to it ({REMOTE_CODE})"
            if (folder / REMOTE_CODE).exists()
            else "cloze export adds the code with which transformers loads it"
        )
        console.warn(f"{folder}: transformers lacks this shape or head; it is in Cloze's own format; {how}")
