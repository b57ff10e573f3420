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
from cloze.launch.pretrained.loading import load_truncation, load_vectors, read_run
from cloze.launch.pretrained.origin import check_tokenizer, trained_fingerprint
from cloze.launch.pretrained.precheck import check_model, named_shape
from cloze.launch.run import integrity, runs
from cloze.launch.system.console import Console
from cloze.model.config import BertConfig, VectorPooling
from cloze.model.config_files import OWN_MODEL_TYPE
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
        UserError, ModelError: there is no such model, it is damaged, or it was trained with another tokenizer.
    """
    check_model(config)
    shape = named_shape(config.model)
    path = fetched_run(config.model, config.model_step) if is_url(config.model) else shape or Path(config.model)
    of_run = runs.is_pretraining(path)
    if config.model_step is not None and not of_run:
        raise UserError(
            f"model_step: found {config.model_step} with {config.model}, expected null: it is for a run of pretraining"
        )
    if shape is not None:
        return _from_shape(config, shape)
    if of_run:
        return _from_run(config, path)
    integrity.check_model(path)
    return _from_folder(config, runs.model_folder(path) if path.is_dir() else fetch_model(config.model, config))


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


def _from_run(config: FinetuneConfig, run: Path) -> Source:
    step, shape, weights = read_run(run, config.model_step, Console().warn)
    length, tokenizer = runs.trained_length(run), _tokenizer(config, integrity.own_tokenizer(run), run)
    check_vocabulary(tokenizer, shape, run)
    return Source(shape, weights, None, tokenizer, step=step, trained_length=length, folder=run)


def _from_folder(config: FinetuneConfig, folder: Path) -> Source:
    shape, weights = load_pretrained(folder)
    head = load_head(folder)
    # old BERT folders do not name a class
    architecture = load_architecture(folder) if load_note(folder, "architectures") else None
    truncation, vectors = load_truncation(folder, shape), load_vectors(folder)
    tokenizer = _tokenizer(config, folder, folder)
    check_vocabulary(tokenizer, shape, folder)
    return Source(
        shape,
        weights,
        head,
        tokenizer,
        architecture,
        trained_length=truncation.max_length if truncation else None,
        pooling=vectors.pooling if vectors else None,
        folder=folder,
    )


def _tokenizer(config: FinetuneConfig, own: Path, model: Path) -> Tokenizer:
    """The tokenizer of `--tokenizer`, else the model's.

    Args:
        own: folder of the model's tokenizer.
        model: the run of pretraining or the model folder.

    Raises:
        UserError: the model was trained with another one.
    """
    tokenizer = Tokenizer.from_folder(config.tokenizer or own)
    if config.tokenizer is None:
        check_tokenizer(tokenizer, model)
        return tokenizer
    expected = trained_fingerprint(model)
    if expected is None and holds_tokenizer(own):
        expected = Tokenizer.from_folder(own).fingerprint
    if expected not in (None, tokenizer.fingerprint):
        raise UserError(
            f"tokenizer: found one with fingerprint {tokenizer.fingerprint[:12]} in {tokenizer.folder}, "
            f"expected {expected!s:.12}, the one that {model} was trained with; leave --tokenizer out"
        )
    return tokenizer


def warn_of_own_format(folder: Path, console: Console) -> None:
    """Warn if transformers cannot load a model folder by itself."""
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == OWN_MODEL_TYPE:
        how = (
            f"transformers loads it with trust_remote_code=True, by the code next to it ({REMOTE_CODE})"
            if (folder / REMOTE_CODE).exists()
            else "cloze export adds the code with which transformers loads it"
        )
        console.warn(f"{folder}: transformers lacks this shape or head; it is in Cloze's own format; {how}")
