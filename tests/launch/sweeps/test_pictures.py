"""The picture of a sweep: axes that fit the later part, bands, results."""

import json
import statistics

import pytest

from cloze.launch.sweeps import pictures
from cloze.launch.sweeps.pictures import DrawnSetting, draw_sweep
from cloze.launch.sweeps.results import statistics_of
from cloze.launch.sweeps.run import Run

STEPS = range(0, 1001, 100)


def made(folder, values: dict[str, list[float] | None], seeds: int, failed: tuple[str, ...] = ()) -> DrawnSetting:
    """A setting whose runs fall from 10 within 300 steps, and end at given values; those that failed end half-way."""
    settings = {"train.learning_rate": next(iter(values)), "model.hidden_size": "64"}
    planned, found = [], {}
    for seed, end in zip(range(seeds), next(iter(values.values())), strict=True):
        run = Run(f"{next(iter(values))}-{seed}", folder / f"{next(iter(values))}-{seed}", settings)
        run.folder.mkdir()
        steps = STEPS if run.name not in failed else STEPS[:6]
        lines = [{"step": step, "validation/loss": end + max(0, 10 - end) * max(0, 1 - step / 300)} for step in steps]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        planned.append(run)
        if run.name not in failed:
            found[run.name] = end
    return DrawnSetting(settings, planned, statistics_of(found) if found else None)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws settings, and gives the two panels instead of writing them."""

    def draw(*settings: DrawnSetting, best: float, metric: str = "validation/loss"):
        saved = []
        monkeypatch.setattr(pictures, "save", lambda figure, path: saved.append(figure))
        draw_sweep(tmp_path / "curves.png", metric, "at the end", best, settings)
        return saved[0].axes

    return draw


def test_the_axes_fit_the_later_part_and_a_band_shows_the_seeds(drawn, tmp_path):
    ends = {"1e-3": [2.0, 2.1, 2.3], "1e-4": [2.2, 2.4, 2.9]}
    settings = [made(tmp_path, {rate: values}, 3, ("1e-4-2",)) for rate, values in ends.items()]
    above, below = drawn(*settings, best=2.1)
    mean, deviation = statistics.mean(ends["1e-3"]), statistics.stdev(ends["1e-3"])
    low, high = above.get_ylim()
    assert 1.9 < low < mean - deviation and 2.45 < high < 2.6, "the first values, up to 10, do not count"
    assert "earlier values lie beyond" in above.get_title(), "an axis is not cut without a word"
    assert 200 < above.get_xlim()[0] < 300 and above.get_xlim()[1] > 1000
    first, second, failed = above.get_lines()
    assert list(first.get_ydata())[4:] == pytest.approx([mean] * 7)
    assert list(second.get_ydata())[4:] == pytest.approx([2.3] * 7), "the failed run is not in the mean"
    assert failed.get_linestyle() == ":" and list(failed.get_xdata()) == list(STEPS[:6])
    band = above.collections[0].get_paths()[0].vertices
    assert {round(y, 6) for x, y in band if x == 900} == {round(mean - deviation, 6), round(mean + deviation, 6)}
    legend = above.get_legend()
    assert legend.get_title().get_text() == "train.learning_rate, model.hidden_size", "full names of fields"
    names = ["1e-3, 64 (mean of 3)", "1e-4, 64 (mean of 2)", "1e-4, 64 (failed)"]
    assert [text.get_text() for text in legend.get_texts()] == names
    assert below.get_ylabel() == "train.learning_rate,\nmodel.hidden_size"
    assert [text.get_text() for text in below.get_yticklabels()] == ["1e-3, 64", "1e-4, 64"]
    said = [text.get_text() for text in below.texts]
    assert said == [f"{mean:.4f} ± {deviation:.4f}", f"2.3000 ± {statistics.stdev([2.2, 2.4]):.4f}"]
    points = [line for line in below.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in points] == [ends["1e-3"], ends["1e-4"][:2]]


def test_a_setting_that_diverged_does_not_squeeze_the_others(drawn, tmp_path):
    settings = [made(tmp_path, {rate: [end]}, 1) for rate, end in (("1e-3", 2.0), ("1e-4", 2.2), ("1e-1", 8.0))]
    above, below = drawn(*settings, best=2.0)
    assert above.get_ylim()[1] < 2.5 and below.get_xlim()[1] < 2.5
    (arrow,) = [line for line in below.get_lines() if line.get_marker() == ">"]
    assert list(arrow.get_ydata()) == [2] and below.texts[2].get_text() == "8.0000"
    assert above.get_legend().get_texts()[2].get_text() == "1e-1, 64, beyond the axis"
    above, below = drawn(settings[0], settings[2], best=2.0)
    assert above.get_ylim()[1] > 8 and below.get_xlim()[1] > 8, "of two, both are seen"


def test_settings_without_curves_and_without_results(drawn, tmp_path):
    """A run whose process never began, beside one that was measured once."""
    silent = DrawnSetting({"seed": "1"}, [Run("silent", tmp_path / "silent", {})], None)
    (tmp_path / "once").mkdir()
    (tmp_path / "once" / "metrics.jsonl").write_text('{"step": 5, "validation/loss": 2.0}\n')
    once = DrawnSetting({"seed": "2"}, [Run("once", tmp_path / "once", {})], statistics_of({"once": 2.0}))
    above, below = drawn(once, silent, best=2.0)
    assert [list(line.get_xdata()) for line in above.get_lines()] == [[5]] and not above.get_title()
    assert [text.get_text() for text in below.texts] == ["2.0000", "no result"]


def test_a_run_that_was_measured_at_its_begin_and_end_is_shown_whole(drawn, tmp_path):
    (tmp_path / "short").mkdir()
    lines = ('{"step": 0, "validation/loss": 4.2}', '{"step": 10, "validation/loss": 4.1}')
    (tmp_path / "short" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    short = DrawnSetting({"seed": "1"}, [Run("short", tmp_path / "short", {})], statistics_of({"short": 4.1}))
    above, _ = drawn(short, best=4.1)
    assert above.get_xlim()[0] <= 0 and above.get_xlim()[1] >= 10 and not above.get_title()


@pytest.mark.parametrize("metric", ["validation/loss", "validation/loss/web"], ids=["pooled", "of a source"])
def test_results_over_rates_have_a_line_for_each_of_the_other_settings(drawn, tmp_path, metric):
    losses = {"64": {"1e-3": 2.0, "2e-3": 1.9, "4e-3": 2.2}, "128": {"1e-3": 1.8, "2e-3": 1.7, "4e-3": None}}
    settings = []
    for width, reached in losses.items():
        for rate, loss in reached.items():
            values = {"model.hidden_size": width, "train.learning_rate": rate}
            run = Run(f"{width}-{rate}", tmp_path / f"{width}-{rate}", values)
            settings.append(DrawnSetting(values, [run], loss and statistics_of({run.name: loss})))
    *_, panel = drawn(*settings, best=1.7, metric=metric)
    lines = {line.get_label(): line for line in panel.get_lines() if not line.get_label().startswith("_")}
    assert list(lines) == ["64", "128"] and panel.get_xscale() == "log"
    assert sorted(text.get_text() for text in panel.get_xticklabels()) == ["1e-3", "2e-3", "4e-3"], "as written"
    assert not panel.get_xticks(minor=True).size
    assert list(lines["64"].get_xdata()) == [1e-3, 2e-3, 4e-3] and list(lines["64"].get_ydata()) == [2.0, 1.9, 2.2]
    assert list(lines["128"].get_xdata()) == [1e-3, 2e-3], "one has no result"
    dotted = [line.get_xdata()[0] for line in panel.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [2e-3, 2e-3] and panel.get_legend().get_title().get_text() == "model.hidden_size"
    assert len(drawn(*settings[:3], best=1.9)) == 2, "one size alone is shown by the panel of results"
