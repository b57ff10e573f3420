"""Which lines of metrics.jsonl stay at a resume, and how much of it is in memory."""

import json
import tracemalloc

from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.metrics_file import iterate_metrics, kept_lines, newest_metrics


def test_an_evaluation_without_a_loss_is_not_shown_twice():
    """Of a run that was killed before its first checkpoint, and measures the start again."""
    kept = [{"step": 0, "train/loss": 2.0}]
    assert kept_lines([*kept, {"step": 0, "validation/spearman": 0.5}, {"step": 1, "train/loss": 1.0}], 0, -1) == kept


def test_a_file_of_any_size_is_read_and_cut_line_by_line(tmp_path, capsys):
    """Zeros without an end of a line between lines, as a file system leaves them after a power failure."""
    path, zeros, lines = tmp_path / "metrics.jsonl", 200 << 20, 5000
    with open(path, "wb") as file:
        for step in range(lines):
            file.write(json.dumps({"step": step, "train/loss": 1.0, "padding": step}).encode() + b"\n")
        file.seek(zeros, 1)
        file.write(b'\n{"step": 5000, "train/loss": 2.0}\n{"step": %d, "train/loss": 3.0}\n{"step": 50' % (1 << 70))
    tracemalloc.start()
    assert sum(1 for _ in iterate_metrics(tmp_path)) == lines + 1
    assert newest_metrics(tmp_path) == {"step": 5000, "train/loss": 2.0}
    writer = MetricsWriter(tmp_path, 4000, trackers=())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < zeros / 2
    writer.close()
    assert [line["step"] for line in iterate_metrics(tmp_path)] == list(range(4001)) and writer.num_lines(9, 0) == 10
    assert path.stat().st_size < 1 << 20 and "found 2 damaged lines" in " ".join(capsys.readouterr().err.split())
