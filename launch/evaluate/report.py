"""Results of an evaluation as a table, as a picture, and as curves over the checkpoints of a run."""

from pathlib import Path

from cloze.launch.sweeps.run import no_better
from cloze.launch.system.console import Console
from cloze.launch.system.pictures import new_figure, save
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import is_number

_MEANS = ("mean_of_paradigms", "mean_of_phenomena")
# What a result of a suite has, and what of it are numbers by name.
_FIELDS = {
    "blimp": (_MEANS, ("paradigms", "phenomena")),
    "lines": (("lines", "characters", "tokens", "log_likelihood", "log_likelihood_per_character"), ()),
}


def print_result(console: Console, title: str, result: Fields) -> None:
    """Print a table: for pairs the phenomena with their paradigms, for lines the numbers."""
    if "paradigms" not in result:
        console.facts(
            title,
            [
                (name.replace("_", " "), f"{value:,.5f}" if isinstance(value, float) else f"{value:,}")
                for name, value in result.items()
            ],
        )
        return
    console.facts(
        title,
        [
            *((name.replace("_", " "), f"{value:.1f}") for name, value in result["paradigms"].items()),
            ("", ""),
            *((name.replace("_", " "), f"{value:.1f}") for name, value in result["phenomena"].items()),
            ("", ""),
            *((name.replace("_", " "), f"{result[name]:.2f}") for name in _MEANS),
        ],
    )


def is_result(suite: str, found: object) -> bool:
    """Whether a value of JSON is what an evaluation of a suite gives."""
    numbers, by_name = _FIELDS[suite]
    if not isinstance(found, dict) or found.keys() != {*numbers, *by_name}:
        return False
    named = [found[name] for name in by_name]
    if not all(isinstance(each, dict) for each in named):
        return False
    values = [*(found[name] for name in numbers), *(value for each in named for value in each.values())]
    return all(map(is_number, values)) and (suite != "blimp" or all(0 <= value <= 100 for value in values))


def print_tasks(console: Console, title: str, result: Fields) -> None:
    """Print a table of fine-tuned tasks: median and spread over the seeds; and those of random weights, if measured."""
    starts = {"": "tasks"} | ({"random weights: ": "random_weights"} if "random_weights" in result else {})
    columns = [f"{start}{column}" for start in starts for column in ("median", "mean ± deviation")]
    console.table(
        title,
        ("task", "metric", *columns, "seeds"),
        [
            (
                task,
                each["metric"],
                *(text for part in starts.values() for text in _spread(result[part][task])),
                str(len(each["seeds"])),
            )
            for task, each in result["tasks"].items()
        ],
    )
    for task, each in result["tasks"].items():
        if why := no_better(f"{task}/{each['metric']}", each["median"], each["majority"]):
            console.warn(why)


def _spread(task: Fields) -> tuple[str, str]:
    deviation = "" if task["deviation"] is None else f" ± {task['deviation']:.4f}"
    return f"{task['median']:.4f}", f"{task['mean']:.4f}{deviation}"


def draw(path: Path, title: str, result: Fields) -> None:
    """Draw bars of the phenomena, sorted from the bottom, and their mean."""
    phenomena = dict(sorted(result["phenomena"].items(), key=lambda item: item[1]))
    figure = new_figure(8, 1.2 + 0.32 * len(phenomena))
    axes = figure.add_subplot()
    axes.barh([name.replace("_", " ") for name in phenomena], list(phenomena.values()), color="#4477aa")
    for place, value in enumerate(phenomena.values()):
        axes.text(value + 0.5, place, f"{value:.1f}", va="center", fontsize=8)
    axes.axvline(50, color="black", linewidth=0.8, linestyle=":")  # chance
    mean = result["mean_of_phenomena"]
    axes.axvline(mean, color="#cc6677", linewidth=1)
    axes.set_title(f"{title}: mean of phenomena {mean:.2f}%", fontsize=10)
    axes.set_xlim(0, 100)
    axes.set_xlabel("pairs whose good sentence is the more probable, %")
    save(figure, path)


def scalars(suite: str, result: Fields) -> dict[str, float]:
    """The values of a result as curves: `SUITE/NAME`."""
    if "paradigms" not in result:
        return {f"{suite}/log_likelihood_per_character": result["log_likelihood_per_character"]}
    return (
        {f"{suite}/{name}": result[name] for name in _MEANS}
        | {f"{suite}-phenomena/{name}": value for name, value in result["phenomena"].items()}
        | {f"{suite}-paradigms/{name}": value for name, value in result["paradigms"].items()}
    )
