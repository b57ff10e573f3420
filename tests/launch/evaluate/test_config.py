"""What `cloze evaluate` is asked for."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize(
    ("suite", "data", "name", "is_text"),
    [
        ("lines", "texts", "texts/sub/r.json", True),
        ("lines", "texts", "texts/.r.json", False),
        ("lines", "texts/*", "texts/r.txt", True),
        ("lines", "texts/*.txt", "texts/r.json", False),
        ("lines", "te?ts/**/*.txt", "texts/sub/r.txt", True),
        ("lines", "texts/.*", "texts/.r.txt", True),
        ("lines", "linked", "texts/r.txt", True),
        ("lines", "below/../../texts", "texts/r.txt", True),
        ("lines", "texts", "loop/r.txt", False),
        ("blimp", "texts", "texts/r.jsonl", True),
        ("blimp", "texts", "texts/sub/r.jsonl", False),
        ("glue", "texts", "texts/sub/dev.tsv", True),
        ("glue", "texts", "texts/dev.tsv", False),
        ("glue", "texts", "texts/sub/result.tsv", False),
    ],
)
def test_a_result_does_not_become_a_text_of_the_next_evaluation(tmp_path, monkeypatch, suite, data, name, is_text):
    (tmp_path / "exp[1]/texts/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "exp[1]")
    Path("below").symlink_to("texts/sub")
    Path("linked").symlink_to("texts")
    Path("loop").symlink_to("loop")
    of_suite = {"output": "o"} if suite == "glue" else {}
    expected = pytest.raises(UserError, match="would read it as one") if is_text else nullcontext()
    with expected:
        EvaluateConfig("m", suite=suite, data=data, json=name, **of_suite)
