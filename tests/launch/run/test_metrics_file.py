"""Which lines of metrics.jsonl stay at a resume."""

from cloze.launch.run.metrics_file import kept_lines


def test_an_evaluation_without_a_loss_is_not_shown_twice():
    """Of a run that was killed before its first checkpoint, and measures the start again."""
    kept = [{"step": 0, "train/loss": 2.0}]
    assert kept_lines([*kept, {"step": 0, "validation/spearman": 0.5}, {"step": 1, "train/loss": 1.0}], 0, -1) == kept
