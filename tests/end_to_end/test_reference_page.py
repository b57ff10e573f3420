"""docs/reference.md is what the sources say today, and has all that docs/python.md uses."""

import importlib.util
import re

from tests.launching import ROOT


def generated() -> str:
    described = importlib.util.spec_from_file_location("write_reference", ROOT / "docs/write_reference.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module.page()


def test_the_page_is_current():
    assert (ROOT / "docs/reference.md").read_text(encoding="utf-8") == generated(), (
        "signatures or docstrings have changed: python docs/write_reference.py"
    )


def test_what_the_page_of_examples_imports_is_in_it():
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    examples = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    imported = re.findall(r"^from (cloze[\w.]*) import (.+)$", examples, re.MULTILINE)
    names = [f"{module}.{name}" for module, listed in imported for name in listed.split(", ")]
    assert len(names) > 8
    assert [name for name in names if f"### `{name}`" not in page] == []


def test_fields_are_shown_also_those_of_a_base():
    page = generated()
    for name, field in (
        ("vectors.Embed", "pooling"),
        ("vectors.Features", "layer"),
        ("manifest.Manifest", "vocab_size"),
    ):
        (entry,) = [each for each in page.split("\n### ") if each.startswith("`cloze.") and f".{name}`" in each[:80]]
        assert f"\n- `{field}: " in entry, name


def test_everything_in_it_says_what_it_is():
    """No bare signature: each function, method and class has its sentence."""
    lines = generated().split("\n")
    for number, line in enumerate(lines):
        if line.startswith("### ") and "NO_LABEL" not in line:
            end = lines.index("```", number)
            assert lines[end + 2].strip() and not lines[end + 2].startswith(("#", "```")), line
