"""What evaluations measure, and in which direction each measure improves."""

_LOWER, _HIGHER = True, False  # is better
# Losses and perplexities of pretraining, metrics of launch/finetune/scoring.py.
MEASURES = {
    "loss": _LOWER,
    "perplexity": _LOWER,
    "error": _LOWER,
    "accuracy": _HIGHER,
    "exact_match": _HIGHER,
    "precision": _HIGHER,
    "recall": _HIGHER,
    "f1": _HIGHER,
    "f1_macro": _HIGHER,
    "f1_micro": _HIGHER,
    "matthews_correlation": _HIGHER,
    "pearson": _HIGHER,
    "spearman": _HIGHER,
    "mean_squared_error": _LOWER,
    "accuracy_mean": _HIGHER,
    "ndcg_at_10": _HIGHER,
    "recall_at_1": _HIGHER,
    "recall_at_5": _HIGHER,
    "recall_at_10": _HIGHER,
}
_LOWER_ENDINGS = ("loss", "perplexity", "error")  # of the names of users' curves


def first_measure(name: str) -> str | None:
    """The measure that a name is or begins with, as that of a column (accuracy_topic); None: it does not."""
    return next((each for each in MEASURES if f"{name}_".startswith(f"{each}_")), None)


def lower_is_better(curve: str) -> bool:
    """Whether the lower of two values of a curve is the better one.

    The curve's name is `MEASURE`, `MEASURE_COLUMN` (mean_squared_error_fluency), `TERM_MEASURE` (mlm_loss) or any of
    them with `/SET` behind it. What begins with a measure is of that, whatever the column is called: no term of an
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
            return own.endswith(_LOWER_ENDINGS)
    return MEASURES[name]
