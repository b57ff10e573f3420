"""YAML is read within bounds."""

import pytest

from cloze.launch.commands import parse
from cloze.launch.run import runs
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\n".join(
                ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0]"]
                + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
            ),
            "whose aliases expand to",
        ),
        ("deepspeed: &a\n  b: *a\n", "values that are nested too deep"),
        ("deepspeed: " + "[" * 5000 + "]" * 5000, "values that are nested too deep"),
    ],
)
def test_yaml_that_expands_without_end_is_refused_at_once(tmp_path, text, expected):
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        parse("pretrain", ["--config", str(tmp_path / "bomb.yaml"), "--data", "d", "--output", "o"])
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        runs.fields_of(tmp_path)


def test_aliases_of_a_usual_size_are_read(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "schedule: {warmup_steps: 7}\ndeepspeed:\n  wall_clock_breakdown: &no false\n  dump_state: *no\n"
    )
    config = parse("pretrain", ["--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o"])
    assert config.schedule.warmup_steps == 7
    assert config.deepspeed == {"wall_clock_breakdown": False, "dump_state": False}
