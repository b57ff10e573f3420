"""The line of progress that a run prints: which values stand in it, in which order, and the time left."""

import re
import time
from collections.abc import Mapping

from cloze.launch.system.console import Console, clock

# What says the same as another value, or is one of many: perplexities, averages, columns, parts of SQuAD's questions.
_LEFT_OUT = r"loss$|\w*perplexity$|ema_|accuracy_(?!mean)|recall_at_5$|exact$|total$|HasAns_|NoAns_"
# Scalars of a progress line in their order: pattern of the name in the metrics, label of what the pattern's group
# matches, format. Terms of objectives and metrics of tasks follow from their names.
_COLUMNS = tuple(
    (re.compile(pattern), label, form)
    for pattern, label, form in (
        (r"train/loss", "loss", "{:.4f}"),
        (r"train/(\w+)_loss", "{}", "{:.4f}"),
        (r"train/learning_rate", "rate", "{:.2e}"),
        (r"train/gradient_norm", "norm", "{:.2f}"),
        (r"train/loss_spike", "SPIKE", "{:.2f} x the median"),
        (r"speed/tokens_per_second", "tokens/s", "{:,.0f}"),
        (r"speed/mfu", "MFU", "{:.1%}"),
        (r"validation/loss", "validation loss", "{:.4f}"),
        (rf"validation/(?!{_LEFT_OUT})(\w+?)(?:_loss)?", "{}", "{:.4f}"),
    )
)
_SHORT = {"next_sentence": "nsp", "next_sentence_accuracy": "nsp accuracy"}


def _columns(scalars: Mapping[str, float | None]) -> list[str]:
    """The values that a progress line shows, each with its label."""
    parts = []
    for pattern, label, form in _COLUMNS:
        for name, value in scalars.items():
            if value is not None and (match := pattern.fullmatch(name)):
                words = [_SHORT.get(part, part.replace("_", " ")) for part in match.groups()]
                parts.append(f"{label.format(*words)} {form.format(value)}")
    return parts


# Scalars of which there is one for each source of a mixture, or validation set; so many of them have a place in a line.
_BY_SOURCE = ("train/mlm_loss/", "validation/loss/")
_MOST_SOURCES = 6


def has_progress(scalars: Mapping[str, float | None]) -> bool:
    """Whether a progress line would show any of these values."""
    return bool(_columns(scalars))


class ProgressLine:
    """Prints the lines of a run on a console.

    Args:
        estimates: whether the time left is estimated from earlier lines where it is not given.
    """

    def __init__(self, console: Console, *, estimates: bool = True) -> None:
        self._console, self._estimates = console, estimates
        self._began: tuple[float, int] | None = None  # when, and at which step, the first line was printed

    def show(
        self, step: int, max_steps: int | None, scalars: Mapping[str, float | None], seconds_left: float | None = None
    ) -> None:
        """Print one line: step, scalars, time left.

        Args:
            max_steps: steps of the run; None: its end is not a number of steps.
            scalars: values by name; None stands for a value that was not finite.
        """
        parts = _columns(scalars)
        scalars = {name: value for name, value in scalars.items() if value is not None}
        sources = [(name.rsplit("/", 1)[1], value) for name, value in scalars.items() if name.startswith(_BY_SOURCE)]
        parts += [f"{name} {value:.4f}" for name, value in sources[:_MOST_SOURCES]]
        now = time.monotonic()
        if seconds_left is not None:
            parts.append(f"{clock(max(0.0, seconds_left))} left")
        elif not self._estimates or max_steps is None:
            pass
        elif self._began is None:
            self._began = (now, step)
        elif step > self._began[1]:
            left = (now - self._began[0]) / (step - self._began[1]) * (max_steps - step)
            parts.append(f"{clock(left)} left")
        self._console.say(f"step {step}{'' if max_steps is None else f'/{max_steps}'}  " + "  ".join(parts))
