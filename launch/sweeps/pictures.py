"""The picture of a sweep: its settings' curves, and what their runs reach."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloze.launch.config.metrics import lower_is_better
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import iterate_metrics
from cloze.launch.sweeps.run import Run, shown
from cloze.launch.system.pictures import colours, new_figure, save
from cloze.pipeline.fields import Fields

_LATER = 0.5  # share of the steps, from the end, to which the vertical axis is fitted
_MARGIN = 0.06  # of the axis's range, above and below
_NAMED_CURVES = 12  # settings that a legend beside the curves can hold; the panel below names any number
_LINE_INCHES = 0.3  # of a setting in the panel of results


@dataclass(frozen=True)
class DrawnSetting:
    """A setting with its runs."""

    settings: dict[str, str]
    runs: Sequence[Run]
    measured: Fields | None
    """The statistics of the runs that have a result (sweeps/run.py); None: none has one."""

    @property
    def values(self) -> str:
        """The values of the setting's fields, in their order."""
        return ", ".join(self.settings.values()) or "as configured"

    def curves(self, metric: str) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
        """Values by step of each run that has a result, and of each that has none."""
        curves: tuple[list[dict[int, float]], list[dict[int, float]]] = [], []
        for run in self.runs:
            failed = self.measured is None or run.name not in self.measured["values"]
            if (run.folder / runs.METRICS).is_file():
                lines = iterate_metrics(run.folder)
                curves[failed].append({line["step"]: line[metric] for line in lines if line.get(metric) is not None})
        return curves


@dataclass(frozen=True)
class _Band:
    """The mean of curves, and their sample standard deviation (0 for a single curve), at the steps that all have."""

    steps: list[int]
    means: list[float]
    deviations: list[float]

    @classmethod
    def of(cls, curves: list[dict[int, float]]) -> _Band:
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        values = [[curve[step] for curve in curves] for step in steps]
        deviations = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
        return cls(steps, [statistics.fmean(each) for each in values], deviations)

    def edges(self) -> list[tuple[float, float]]:
        """The lower and the upper edge of the band at each step."""
        bands = zip(self.means, self.deviations, strict=True)
        return [(mean - deviation, mean + deviation) for mean, deviation in bands]

    def went_along(self, best: float) -> bool:
        """Whether the curve has gone at least half of the way from its first value to the best result. Curves that have
        not, of runs that diverged, would stretch the axis until all others look like one line.
        """
        return bool(self.steps) and abs(self.means[-1] - best) <= abs(self.means[0] - best) / 2


def draw_sweep(path: Path, metric: str, result: str, best: float, drawn: Sequence[DrawnSetting]) -> None:
    """Draw the mean curve of each setting with its band, and below it what its runs reach.

    If a field has three numbers or more, and another field several values, a third panel has the results over the
    numbers, a line for each of the other settings: whether one learning rate is the best for all sizes of a model.

    Args:
        metric: the curve in the runs' metrics, `validation/loss`.
        result: when the results are measured, for the title of their panel.
        best: the best of the settings' medians.
        drawn: the settings, in the order in which they are shown.
    """
    height, axis = 1.2 + _LINE_INCHES * len(drawn), _numeric_axis(drawn)
    heights = (4.6, height, *((4.6,) if axis else ()))
    figure = new_figure(10, sum(heights))
    above, below, *last = figure.subplots(len(heights), height_ratios=heights)
    if axis:
        _draw_over(last[0], axis, metric, drawn)
    fields = ", ".join(drawn[0].settings)
    shades = colours(len(drawn))
    curves = [each.curves(metric) for each in drawn]
    bands = [_Band.of(measured) for measured, _ in curves]
    shown_ones = [band.went_along(best) for band in bands]
    if sum(shown_ones) < 2:  # alone a curve is compared with nothing
        shown_ones = [True] * len(bands)
    for setting, colour, band, (measured, failed), chosen in zip(drawn, shades, bands, curves, shown_ones, strict=True):
        name = setting.values + f" (mean of {len(measured)})" * (len(measured) > 1) + ", beyond the axis" * (not chosen)
        _draw_curves(above, name, f"{setting.values} (failed)", colour, band, failed)
    _fit_curves(above, [band for band, chosen in zip(bands, shown_ones, strict=True) if chosen])
    above.set_xlabel("step")
    above.set_ylabel(metric)
    above.grid(alpha=0.3)
    handles, labels = above.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if fields and len(once) <= _NAMED_CURVES:
        small: Fields = {"fontsize": "small", "title_fontsize": "small", "alignment": "left"}
        above.legend(once.values(), once, title=fields, **small)
    for line, (setting, colour) in enumerate(zip(drawn, shades, strict=True)):
        _draw_result(below, line, setting.measured, colour)
    _fit_results(below, drawn, shades, shown_ones)
    below.set_yticks(range(len(drawn)), [each.values for each in drawn], fontsize="small")
    below.set_ylabel(fields.replace(", ", ",\n"), fontsize="small")
    below.set_xlabel(metric)
    several = any(each.measured and each.measured["n"] > 1 for each in drawn)
    below.set_title(result + ": each run (o), median (|), mean ± deviation" * several, fontsize="medium")
    below.grid(axis="x", alpha=0.3)
    save(figure, path)


def _numeric_axis(drawn: Sequence[DrawnSetting]) -> str | None:
    """The field with the most numbers above 0, if it has three or more, and settings differ in others too."""
    values = {name: {each.settings[name] for each in drawn} for name in drawn[0].settings}
    numeric = [name for name, found in values.items() if len(found) > 2 and all(_positive(each) for each in found)]
    if not numeric or sum(len(found) > 1 for found in values.values()) < 2:
        return None
    return max(numeric, key=lambda name: (name == "train.learning_rate", len(values[name])))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _draw_over(axes: Any, field: str, metric: str, drawn: Sequence[DrawnSetting]) -> None:
    """Medians over the numbers of `field`, a line for each combination of the other fields; dotted: its best."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in drawn:
        if each.measured:
            others = ", ".join(value for name, value in each.settings.items() if name != field)
            point = (float(each.settings[field]), each.measured["median"])
            lines.setdefault(others, []).append(point)
    sign = 1 if lower_is_better(metric.partition("/")[2]) else -1
    for (name, points), colour in zip(lines.items(), colours(len(lines)), strict=True):
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", label=name)
        best = min(points, key=lambda point: sign * point[1])
        axes.axvline(best[0], color=colour, linestyle=":", linewidth=1)
    axes.set_xscale("log")
    numbers = {float(each.settings[field]): each.settings[field] for each in drawn}
    axes.set_xticks(list(numbers), list(numbers.values()))  # as written; a log scale's own labels are formulas
    axes.minorticks_off()
    axes.set_xlabel(field)
    axes.set_ylabel(metric)
    axes.set_title("median over the seeds; dotted: the best of a line", fontsize="medium")
    axes.grid(alpha=0.3)
    if len(lines) <= _NAMED_CURVES:
        axes.legend(title=", ".join(name for name in drawn[0].settings if name != field), fontsize="small")


def _draw_curves(
    axes: Any, name: str, failed_name: str, colour: Any, band: _Band, failed: list[dict[int, float]]
) -> None:
    if band.steps:
        axes.plot(band.steps, band.means, color=colour, marker="o" if len(band.steps) == 1 else None, label=name)
    if any(band.deviations):
        axes.fill_between(band.steps, *zip(*band.edges(), strict=True), color=colour, alpha=0.2, linewidth=0)
    for curve in failed:
        axes.plot(list(curve), list(curve.values()), color=colour, linestyle=":", label=failed_name)


def _draw_result(axes: Any, line: int, measured: Fields | None, colour: Any) -> None:
    """The runs of a setting as points, their median, and their mean and deviation, which a text says too."""
    beside = axes.get_yaxis_transform()
    if measured is None:
        axes.text(1.02, line, "no result", transform=beside, va="center", fontsize="small")
        return
    deviation = measured["deviation"]
    said = shown(measured["mean"]) + ("" if deviation is None else f" ± {shown(deviation)}")
    axes.text(1.02, line, said, transform=beside, va="center", fontsize="small")
    axes.errorbar(measured["mean"], line, xerr=deviation, fmt="D", color=colour, markersize=6, capsize=4)
    if measured["n"] > 1:
        axes.plot(list(measured["values"].values()), [line] * measured["n"], "o", color=colour, alpha=0.5, markersize=5)
        axes.plot(measured["median"], line, "|", color="black", markersize=14)


def _fit_curves(axes: Any, bands: Sequence[_Band]) -> None:
    """Fit the axes to the later part of the curves, where there is one: the first steps' values are many times as far
    apart.
    """
    later = (1 - _LATER) * max((band.steps[-1] for band in bands if band.steps), default=0)
    points = [pair for band in bands for pair in zip(band.steps, band.edges(), strict=True)]
    if len({step for step, _ in points if step >= later}) < 2:  # the later part of the curves is a single point
        return
    limits = _limits([edge for step, edges in points if step >= later for edge in edges])
    if limits is None:
        return
    axes.set_ylim(limits)
    inside = [step for step, (lower, upper) in points if upper >= limits[0] and lower <= limits[1]]
    axes.set_xlim(_limits(inside))
    if not all(limits[0] <= edge <= limits[1] for _, edges in points for edge in edges):
        axes.set_title("the axes fit the second half of the steps; earlier values lie beyond them", fontsize="medium")


def _fit_results(axes: Any, drawn: Sequence[DrawnSetting], shades: list[Any], chosen: list[bool]) -> None:
    """Fit the axis to the results of settings whose curves are shown; an arrow points to each of the others."""
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    results = [each.measured for each in drawn]
    values: list[float] = []
    for measured, counts in zip(results, chosen, strict=True):
        if measured and counts:
            deviation = measured["deviation"] or 0.0
            values += [*measured["values"].values(), measured["mean"] - deviation, measured["mean"] + deviation]
    limits = _limits(values)
    if limits is None:
        return
    axes.set_xlim(limits)
    for line, (measured, colour) in enumerate(zip(results, shades, strict=True)):
        if measured and not limits[0] <= measured["mean"] <= limits[1]:
            beyond = measured["mean"] > limits[1]
            axes.plot(limits[beyond], line, "<>"[beyond], color=colour, markersize=10, clip_on=False)


def _limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis on which all values lie; None without values."""
    if not values:
        return None
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low) or 0.01 * abs(high) or 1.0
    return low - margin, high + margin
