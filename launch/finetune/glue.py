"""Prediction files in the format of gluebenchmark.com."""

from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# File names, header, numbering by row and rounding as nyu-mll/jiant writes them (jiant/scripts/postproc: GlueBenchmark,
# get_glue_preds); the label forms are those of the training files.
_NAMES = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "stsb": "STS-B",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
# MNLI has two test sets and the diagnostic one, distinguished by their names in GLUE's archive.
_MNLI_NAMES = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "diagnostic": "AX", "ax": "AX"}
_STSB_RANGE = 0.0, 5.0


def submission_names(config: FinetuneConfig) -> dict[str, str]:
    """Name of each test file's submission by the file's stem; empty unless submissions are requested.

    Raises:
        UserError: the task is not one of GLUE, a test file is not one of MNLI, or labels or rows differ from GLUE's.
    """
    if not config.glue_submission:
        return {}
    if config.task not in (*_NAMES, "mnli"):
        raise UserError(
            f"glue_submission: found true with the task {config.task}, expected one of GLUE's: "
            f"{', '.join((*_NAMES, 'mnli'))}"
        )
    if not config.test or config.labels or config.skip_malformed_rows:
        found = "no test file" if not config.test else "--labels" if config.labels else "--skip_malformed_rows"
        raise UserError(f"glue_submission: found {found}, expected GLUE's own test file, whole, and its own labels")
    names: dict[str, str] = {}
    for path in config.test:
        stem = Path(path).name.split(".")[0]
        if config.task == "mnli" and stem.lower() not in _MNLI_NAMES:
            raise UserError(
                f"glue_submission: found the test file {path}, expected one of the names "
                f"{', '.join(_MNLI_NAMES)}, which distinguish MNLI's test sets; rename it"
            )
        name = f"{_MNLI_NAMES[stem.lower()] if config.task == 'mnli' else _NAMES[config.task]}.tsv"
        if name in names.values():
            raise UserError(f"glue_submission: found two test files that would both be {name}, expected one")
        names[stem] = name
    return names


def submission(predictions: list[Fields]) -> str:
    """Content of a submission: each row's number from 0 and its label, or its value between 0 and 5."""
    rows = "".join(f"{number}\t{_value(each['prediction'])}\n" for number, each in enumerate(predictions))
    return "index\tprediction\n" + rows


def _value(prediction: str | float) -> str:
    if isinstance(prediction, str):
        return prediction
    low, high = _STSB_RANGE
    return f"{min(max(prediction, low), high):.3f}"
