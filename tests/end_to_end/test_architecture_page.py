"""docs/architecture.md: each example of where to add something runs as it stands, and the files it names are there."""

import re

import pytest

from cloze.launch.finetune.tasks import TASKS
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.launch.training.schedules import SHAPES
from cloze.pipeline.formats import FORMATS
from tests.launch.tiny_models import save_model
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^\*\*(An? [\w ]+)\*\*:.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
LONGEST = 30  # lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("page")
    save_model(base / "runs" / "small-hf")
    return base


@pytest.fixture(autouse=True)
def tables():
    """What an example adds is gone after it."""
    found = (TASKS, OPERATIONS, OBJECTIVES, SHAPES, FORMATS)
    before = [dict(table) for table in found]
    yield
    for table, kept in zip(found, before, strict=True):
        table.clear()
        table.update(kept)


def test_there_is_an_example_of_each_kind():
    assert list(EXAMPLES) == [
        "An objective",
        "A reader",
        "A schedule",
        "An optimizer",
        "A head",
        "A family",
        "A task",
        "A predict operation",
    ]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example_runs_and_is_short(folder, monkeypatch, kind):
    monkeypatch.chdir(folder)
    example = EXAMPLES[kind]
    assert len(example.splitlines()) < LONGEST and "assert " in example, "each shows what comes of it"
    exec(compile(example, f"docs/architecture.md: {kind}", "exec"), {"__name__": "example"})


def test_the_files_that_the_page_names_are_there():
    """A name with a folder lies below the repository or launch/; a lone one anywhere."""
    named = set(re.findall(r"`((?:[\w]+/)+[\w]+\.(?:py|yaml|toml))`", PAGE))
    assert len(named) > 30
    missing = [
        name for name in sorted(named) if not any((ROOT / base / name).exists() for base in ("", "launch", "pipeline"))
    ]
    assert not missing


def test_the_page_names_each_file_of_the_model():
    """`model/` has no rooms whose names would say what is in it."""
    words = set(re.findall(r"\w+", PAGE))
    missing = [path.name for path in sorted((ROOT / "model").glob("*.py")) if path.stem not in words | {"__init__"}]
    assert not missing
