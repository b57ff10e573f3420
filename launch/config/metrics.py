"""What evaluations measure, and in which direction each measure improves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A kind of value that an evaluation measures."""

    lower_is_better: bool = False
    """Whether a smaller value is the better one."""


# Losses and perplexities of pretraining, metrics of launch/finetune/scoring.py.
MEASURES = {
    "loss": Measure(lower_is_better=True),
    "perplexity": Measure(lower_is_better=True),
    "error": Measure(lower_is_better=True),
    "accuracy": Measure(),
    "exact_match": Measure(),
    "precision": Measure(),
    "recall": Measure(),
    "f1": Measure(),
    "f1_macro": Measure(),
    "f1_micro": Measure(),
    "matthews_correlation": Measure(),
    "pearson": Measure(),
    "spearman": Measure(),
    "mean_squared_error": Measure(lower_is_better=True),
    "accuracy_mean": Measure(),
    "ndcg_at_10": Measure(),
    "recall_at_1": Measure(),
    "recall_at_5": Measure(),
    "recall_at_10": Measure(),
}
_OTHER = Measure()
_LOWER_IS_BETTER = ("loss", "perplexity", "error")  # last words of the names of users' curves


def first_measure(name: str) -> str | None:
    """The measure that a name is or begins with, as that of a column (accuracy_topic); None: it does not."""
    return next((each for each in MEASURES if f"{name}_".startswith(f"{each}_")), None)


def measure_of(curve: str) -> Measure:
    """The measure of a curve `MEASURE`, `MEASURE_COLUMN` (mean_squared_error_fluency), `TERM_MEASURE` (mlm_loss) or any
    of them with `/SET` behind it. What begins with a measure is of that, whatever the column is called: no term of an
    objective does (`make_objective`).

    For another curve of a user's callback lower is better if its name ends in loss, perplexity or error, otherwise
    higher.
    """
    own = name = curve.partition("/")[0]
    if first := first_measure(own):
        return MEASURES[first]
    while name not in MEASURES:
        _, separator, name = name.partition("_")
        if not separator:
            return MEASURES["loss"] if own.endswith(_LOWER_IS_BETTER) else _OTHER
    return MEASURES[name]
