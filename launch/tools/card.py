"""Files that an export has beside the weights: a model card, and the pooling for sentence-transformers."""

import os
from pathlib import Path

from cloze.launch.config import DataSource
from cloze.launch.pretrained.card_examples import card_metadata
from cloze.launch.pretrained.loading import load_settings, load_truncation, load_vectors
from cloze.launch.pretrained.sentence_transformers import (
    MODULES,
    folder_of_modules,
    read_max_length,
    write_length,
    write_modules,
)
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import is_evaluation, iterate_metrics
from cloze.launch.system.console import figure, markdown
from cloze.launch.system.software import software
from cloze.launch.texts.settings import Truncation, Vectors
from cloze.model.config import BertConfig
from cloze.model.config_files import OWN_MODEL_TYPE
from cloze.model.huggingface import load_head, load_note, load_pretrained
from cloze.model.problems import PROBLEMS
from cloze.model.tasks import saved_class
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import dump_yaml, is_number

# Our class -> the hub's name of its task, and the Auto class of transformers.
_TASKS = {
    "BertForPreTraining": ("fill-mask", "AutoModelForMaskedLM"),
    "BertForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "BertForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "BertForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "BertForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "BertForMultipleChoice": ("multiple-choice", "AutoModelForMultipleChoice"),
}
# Classes without a head for a task.
_ENCODERS = ("BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForReplacedTokenDetection")
# Of the metadata of a model's card, in a copy of the model: whose it is, and what it may be used for.
_KEPT = ("license", "license_name", "license_link", "language", "base_model", "datasets")
# Local paths are private and useless for users of the model.
_PATHS = (
    "output",
    "data",
    "train_file",
    "validation",
    "test",
    "model",
    "tokenizer",
    "cache_dir",
    "init_from",
    "init_word_vectors",
)
_NOT_SHOWN = ("data_cache",)


def write_pooling(folder: Path, source: Path) -> None:
    """Write the files with which sentence-transformers computes the same vectors as `cloze predict embed`: the model's
    pooling, else the mean over all tokens; maximum length as in training. Only for encoders; where the model has
    modules of sentence-transformers that are not computed here, the length alone.

    Args:
        folder: of the export.
        source: the model folder that it is a copy of.
    """
    if saved_class(folder).__name__ not in _ENCODERS:
        return
    vectors = load_vectors(source)
    if vectors is None and folder_of_modules(source):
        if length := read_max_length(source):
            write_length(folder, length)
        return
    vectors = vectors or Vectors()
    config, _ = load_pretrained(folder)
    truncation = load_truncation(source, config)
    longest = truncation.max_length if truncation else config.max_position_embeddings
    write_modules(folder, vectors, config.hidden_size, longest)


def card(run: Path, folder: Path, name: str, said: str) -> str:
    """The model card (README.md) of an exported model.

    Args:
        run: source of the export: a pretraining or fine-tuning run, or a model folder.
        folder: the exported folder.
        name: final name of the folder.
        said: description of what was exported.
    """
    own, kind = load_note(folder, "model_type") == OWN_MODEL_TYPE, saved_class(folder).__name__
    task, auto = _TASKS.get(kind, ("feature-extraction", "AutoModel"))
    encoder = (folder / MODULES).exists()
    task = "sentence-similarity" if load_settings(folder, Vectors) else task
    tags = ["cloze"] + ["sentence-transformers"] * encoder
    copied = not (run / runs.CONFIG).is_file()
    theirs = card_metadata(run) if copied else {}
    head = {"library_name": "transformers", "pipeline_tag": task, "tags": tags}
    head |= {name: theirs[name] for name in _KEPT if name in theirs}
    labels = load_head(folder) if kind == "BertForSequenceClassification" else None
    if labels and not PROBLEMS[labels.problem].in_transformers:  # the pipeline would apply one softmax to all scores
        del head["pipeline_tag"]
    parts = [
        "---",
        dump_yaml(head, sort_keys=False).strip(),
        "---",
        f"# {name}",
        "",
        f"A {load_note(folder, 'model_type')} model ({kind}), {said.replace(str(run), run.resolve().name)}, "
        f"{'copied' if copied else 'made'} with Cloze {software()['cloze']}.",
        "",
        "## Use",
        "",
        _use(name, own, auto, encoder),
        "",
        "## Shape",
        "",
        _shape(load_pretrained(folder)[0], folder),
    ]
    if measured := _measured(run):
        parts += ["## Measured", "", measured]
    if not copied:
        parts += ["## Training", "", _training(run)]
    return "\n".join(parts).rstrip() + "\n"


def _use(name: str, own: bool, auto: str, encoder: bool) -> str:
    trust = ", trust_remote_code=True" * own
    lines = [
        f"from transformers import AutoTokenizer, {auto}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        f'model = {auto}.from_pretrained("{name}"{trust})',
    ]
    if encoder:
        lines += [
            "",
            "from sentence_transformers import SentenceTransformer",
            "",
            f'encoder = SentenceTransformer("{name}"{trust})',
            'vectors = encoder.encode(["a text", "another one"])',
        ]
    text = "\n".join(["```python", *lines, "```"])
    if own:
        text += (
            "\n\nThe shape is none of transformers' own: `trust_remote_code` runs the files `*.py` of this "
            f'folder, which are Cloze\'s. With Cloze installed, `cloze.load("{name}")` needs none of them.'
        )
    return text


def _shape(config: BertConfig, folder: Path) -> str:
    truncation = load_settings(folder, Truncation)
    rows = {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "longest text in training (tokens)": truncation and truncation.max_length,
        "number format": load_note(folder, "dtype"),
    }
    return markdown(("", ""), [(name, value) for name, value in rows.items() if value is not None])


def _measured(run: Path) -> str:
    """Results of a fine-tuning, or the last evaluation of a pretraining."""
    if (run / runs.RESULTS).is_file():
        results = runs.read_fields(run / runs.RESULTS)
        files = {name: values for name, values in results.items() if isinstance(values, dict) and "examples" in values}
        rows = [
            (file, name, figure(value))
            for file, values in files.items()
            for name, value in values.items()
            if name != "examples" and is_number(value)
        ]
        return markdown(("file", "metric", "value"), rows) if rows else ""
    if not (run / runs.CONFIG).is_file() or not (run / runs.METRICS).is_file():
        return ""
    best: dict[str, float] = {}
    step = 0
    for line in iterate_metrics(run):
        if is_evaluation(line):
            best, step = {name: value for name, value in line.items() if name.startswith("validation/")}, line["step"]
    rows = [
        (f"step {step}", name.removeprefix("validation/"), figure(value))
        for name, value in best.items()
        if isinstance(value, float)
    ]
    return markdown(("evaluation", "metric", "value"), rows) if rows else ""


def _training(run: Path) -> str:
    """Hashes of the data, software and hardware, and every field that shaped the result."""
    rows = []
    for path in (run / runs.DATA, run / runs.SOFTWARE):
        if path.is_file():
            facts = runs.read_fields(path)
            rows += [(name.replace("_", " "), f"`{value}`") for name, value in facts.items() if value is not None]
    recipe = runs.read_fields(run / runs.CONFIG)
    recipe = {
        name: value
        for name, value in recipe.items()
        if name not in _NOT_SHOWN and (name not in _PATHS or isinstance(value, dict))
    }
    for name in ("objective_options", "deepspeed"):  # for fields of other versions
        if name in recipe:
            recipe[name] = _without_paths(recipe[name])
    if isinstance(checkpoint := recipe.get("checkpoint"), dict):
        checkpoint.pop("scratch", None)
    try:
        if isinstance(mixture := recipe.get("data"), dict):
            mixture["sources"] = [
                {**source, "path": None, "name": DataSource(**source).label} for source in mixture["sources"]
            ]
        if isinstance(sets := recipe.get("evaluation", {}).get("sets"), dict):
            recipe["evaluation"]["sets"] = dict.fromkeys(sets)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{run / runs.CONFIG}: found sections that no run has ({error}), expected those that the run wrote; "
            "restore the file"
        ) from error
    return "\n".join([markdown(("", ""), rows), "```yaml", dump_yaml(recipe, sort_keys=False).strip(), "```"])


def _without_paths(value: object) -> object:
    """Nested dicts and lists with texts that may be paths replaced by null."""
    if isinstance(value, dict):
        return {name: _without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part) for part in value]
    return None if isinstance(value, str) and ("/" in value or os.sep in value) else value
