"""The shape of a run that starts from another model (`init_from`): the source's, or a given one, compared with it.

Imports no torch: what does not fit is said within a second.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

from cloze.launch.config import PretrainConfig
from cloze.launch.parsing import Given
from cloze.launch.run import runs
from cloze.launch.run.stored_run import fetch_description
from cloze.launch.training.shortening import shorten
from cloze.model.config import BertConfig
from cloze.model.config_files import read_shape
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import StorePath, to_place
from cloze.pipeline.stores.temporary_folders import temporary_folder

# Model fields that may differ between phases, since no weight depends on them. What has changed is reported. A changed
# rotary base changes the outputs; it is raised for longer sequences (ModernBERT's from 10,000 to 160,000, arXiv
# 2412.13663, section 2.2.2). So do shifted predictions, which a run may learn that begins from a model without them.
_FREE = {
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "attention_output_dropout_prob",
    "classifier_dropout",
    "initialization",
    "initializer_range",
    "initializer_cutoff",
    "embedding_initializer_range",
    "position_initializer_range",
    "parametrization",
    "base_hidden_size",
    "base_num_layers",
    "rotary_theta",
    "local_rotary_theta",
    "shifted_predictions",
}
# Model fields that a student (`init_layers`) may have otherwise than the source of its layers. A DistilBERT has no
# segments, and its pooler is the first layer of a classifier, which fine-tuning draws.
_OF_STUDENT = {"family", "pooler_activation", "type_vocab_size"}
OF_VOCABULARY = ("vocab_size", "pad_token_id")  # the shards' tokenizer decides them


def complete(given: Given) -> dict[str, object]:
    """The fields of a pretraining configuration that follow from others: the warmup of a shorter run, and without a
    given model the shape of `init_from`, with the single fields that were typed.

    Raises:
        UserError, ModelError: `init_from` is needed for its shape and is no model.
    """
    values = shorten(given)
    source, output = given.value("init_from"), given.value("output")
    if not source or given.has_section("model"):
        return values
    run = local_description(output) if output else None
    if run and (run / runs.CONFIG).is_file():  # it goes on, and the source may be gone
        shape = runs.model_config(run)
    else:
        shape = replace(source_shape(local_description(source), given.value("init_layers")), vocab_size=0)
    typed = given.fields_of("model")
    return values | {f"model.{name}": value for name, value in asdict(shape).items() if name not in typed}


def local_description(folder: str) -> Path:
    """The folder; of a run in a store, the files that describe it, fetched into a temporary one."""
    place = to_place(folder)
    if not isinstance(place, StorePath):
        return place
    local = temporary_folder(place)
    fetch_description(place, local)
    return local


def source_shape(folder: Path, layers: list[int] | None) -> BertConfig:
    """The shape of a run or of a Hugging Face folder.

    Args:
        layers: those of its layers that are taken; None: all.

    Raises:
        UserError, ModelError: it is neither, or another kind of model.
    """
    check_source(folder)
    shape = runs.model_config(folder) if runs.is_pretraining(folder) else read_shape(runs.model_folder(folder))
    if layers is not None and shape.num_layer_groups is not None:
        raise UserError(
            f"init_layers: found {layers} with {folder}, whose layers share weights (num_layer_groups = "
            f"{shape.num_layer_groups}), expected null: none can be taken alone; leave --init_layers out"
        )
    return shape if layers is None else replace(shape, num_hidden_layers=len(layers))


def check_source(folder: Path) -> None:
    """Raise UserError for a folder that is neither a run nor a model's."""
    if not any((folder / name).is_file() for name in (runs.CONFIG, "config.json")):
        found = f"neither {runs.CONFIG} nor config.json in" if folder.is_dir() else "no folder"
        raise UserError(
            f"init_from: found {found} {folder}, expected the folder of a run of `cloze pretrain` or of a Hugging Face "
            "encoder; check the path, or give another --init_from"
        )


def check_shape(config: PretrainConfig, source: BertConfig, but: Collection[str] = ()) -> None:
    """Raise UserError with all differences of a run's shape from that of its source, except those that may be.

    Args:
        but: fields that are not compared.
    """
    found = [each for name, each in _differences(config, source) if name not in but]
    if not found:
        return
    fix = "leave the model out, by --model or in a file, to take the source's shape"
    if config.model.max_position_embeddings > source.max_position_embeddings:
        extend = ["--init_optimizer false"] * config.init_optimizer + ["--init_positions extend"]
        fix += f"; with {' '.join(extend)} further positions are drawn"
    raise UserError(f"{'; '.join(found)}: {'those' if found[1:] else 'that'} of init_from = {config.init_from}; {fix}")


def _differences(config: PretrainConfig, source: BertConfig) -> Iterator[tuple[str, str]]:
    for field in fields(BertConfig):
        wanted, found = getattr(config.model, field.name), getattr(source, field.name)
        if wanted == found or field.name in _FREE:
            continue
        if field.name in _OF_STUDENT and _is_student(config, source):
            continue
        least = ""
        if field.name == "max_position_embeddings":
            if config.model.position_embedding != "learned" or source.position_embedding != "learned":
                continue
            if wanted > found and config.init_positions == "extend" and not config.init_optimizer:
                continue
            least = "at least " * (wanted < found)
        yield field.name, f"model.{field.name}: found {wanted!r}, expected {least}{found!r}"


def _is_student(config: PretrainConfig, source: BertConfig) -> bool:
    """Whether a run takes layers of a source that differs in segments at most: the student may have none, since learned
    positions can hold what the first segment adds. Positions must begin in the same row.
    """
    model = config.model
    learned = model.position_embedding == source.position_embedding == "learned"
    segments = model.type_vocab_size in (0, source.type_vocab_size) and learned
    return config.init_layers is not None and segments and model.first_position == source.first_position


def check_early(config: PretrainConfig, folder: Path) -> None:
    """Raise UserError or ModelError unless a folder is a source of the run's shape, by its configuration alone. The
    number of tokens, which its tokenizer decides, and whether it has one segment, which its weights show, come later.
    """
    source = source_shape(folder, config.init_layers)
    segments = ("type_vocab_size",) if not source.type_vocab_size and config.model.type_vocab_size == 1 else ()
    check_shape(config, source, (*OF_VOCABULARY, *segments))
