"""What `cloze evaluate` checks before torch is imported."""

import shutil
from pathlib import Path

import pytest

from cloze.launch.evaluate import precheck
from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.evaluate.precheck import check_inputs
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import publish_json


@pytest.mark.parametrize(
    ("suite", "data", "name", "is_text"),
    [
        ("lines", "texts", "texts/sub/r.json", True),
        ("lines", "texts", "texts/new/r.json", True),
        ("lines", "texts", "texts/.r.json", False),
        ("lines", "texts", "elsewhere/r.json", False),
        ("lines", "texts", "other/r.json", True),  # a link in texts
        ("lines", "texts", "texts/more/r.json", True),
        ("lines", "texts/*", "texts/r.txt", True),
        ("lines", "texts/*.txt", "texts/r.json", False),
        ("lines", "texts/*/../*.txt", "texts/r.txt", True),
        ("lines", "te?ts/**/*.txt", "texts/sub/r.txt", True),
        ("lines", "linke?", "texts/r.txt", True),
        ("lines", "texts/.*", "texts/.r.txt", True),
        ("lines", "linked", "texts/r.txt", True),
        ("lines", "below/../../texts", "texts/r.txt", True),
        ("lines", "~/texts/*.txt", "texts/r.txt", True),
        ("lines", "texts", "loop/r.txt", False),
        ("lines", "texts", "lost/r.txt", False),
        ("blimp", "texts", "texts/r.jsonl", True),
        ("blimp", "texts", "texts/sub/r.jsonl", False),
        ("glue", "texts", "texts/sub/dev.tsv", True),
        ("glue", "texts", "texts/sub/test.tsv", True),
        ("glue", "texts", "texts/dev.tsv", False),
        ("glue", "texts", "texts/sub/result.json", False),
        ("lines", "texts", "new/../other/r.json", True),
        ("lines", "texts", "new/../another/r.json", False),
    ],
)
def test_a_result_does_not_become_a_text_of_the_next_evaluation(tmp_path, monkeypatch, suite, data, name, is_text):
    (tmp_path / "exp[1]/texts/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "exp[1]")
    (tmp_path / "home").symlink_to("exp[1]")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("other").mkdir()
    for link, place in (("below", "texts/sub"), ("linked", "texts"), ("loop", "loop"), ("lost", "none/deep")):
        Path(link).symlink_to(place)
    Path("texts/more").symlink_to("../other")
    Path("texts/a.txt").write_text("A text.\n")
    before = sorted(Path().rglob("*"))
    of_suite = {"output": "o"} if suite == "glue" else {}
    otherwise = "choose another path" if name.startswith("lo") else "model: found"
    with pytest.raises(UserError, match="would read it as one" if is_text else otherwise):
        check_inputs(EvaluateConfig("m", suite=suite, data=data, json=name, **of_suite))
    assert sorted(Path().rglob("*")) == before


def test_a_text_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("texts/a.txt", "texts/a.jsonl", "texts/cola/dev.tsv"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("A text.\n")
    for suite, name in (("lines", "texts/a.txt"), ("blimp", "texts/a.jsonl"), ("glue", "texts/cola/dev.tsv")):
        config = EvaluateConfig("m", suite=suite, data="texts", json=name, output="o" if suite == "glue" else None)
        with pytest.raises(UserError, match="the file of the texts, which it would replace"):
            check_inputs(config)
        assert Path(name).read_text() == "A text.\n"


def test_what_others_put_there_meanwhile_stays(tmp_path, monkeypatch):
    """Other evaluations, whose results lie in the same folder or have the same name."""
    monkeypatch.chdir(tmp_path)
    with precheck._file_at(Path("new/r.json")):
        Path("new/other.json").write_text("{}")
    assert [each.name for each in Path("new").iterdir()] == ["other.json"]
    with precheck._file_at(Path("new/r.json")):
        publish_json(Path("new/r.json"), {})
    assert Path("new/r.json").read_text()
    with precheck._file_at(Path("gone/r.json")):
        shutil.rmtree("gone")
    make = precheck._make

    def slowly(path):
        if not calls:
            path.parent.rmdir()  # by another one, which has made it for its own check
        calls.append(path)
        return make(path)

    calls: list[Path] = []
    monkeypatch.setattr(precheck, "_make", slowly)
    with precheck._file_at(Path("gone/r.json")):
        assert Path("gone/r.json").exists()
    assert len(calls) == 2 and not Path("gone").exists()
