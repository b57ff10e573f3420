"""Examples of model cards, as the hub documents their metadata."""

import json
import os

import pytest

from cloze.launch.pretrained.card_examples import Example, card_examples, row_examples

WIDGET = """---
license: mit
widget:
- text: "Where do I live?"
  context: "I live in Paris."
  example_title: Paris
- A plain text.
- source_sentence: a cat
  sentences: [a dog, a car]
- text: It rained, so
  choices: [wet, 3]
- text: a
  text_pair: b
- src: https://example.org/picture.png
- 5
---
# A model

---
"""


def test_the_examples_of_a_card(tmp_path):
    (tmp_path / "README.md").write_bytes(WIDGET.replace("\n", "\r\n").encode())
    assert card_examples(tmp_path) == [
        Example("Where do I live?", "I live in Paris.", "Paris"),
        Example("A plain text."),
        Example("a cat", "a dog"),
        Example("It rained, so", "wet\n3"),
        Example("a", "b"),
    ]


def test_the_examples_of_rows_that_a_run_was_measured_by(tmp_path):
    file = tmp_path / "validation.jsonl"
    assert row_examples(file, ("ticket",)) == []
    rows = [{"ticket": "no login", "note": "a", "prediction": "bug"}, {"ticket": 3, "note": "b"}, {"ticket": "x" * 600}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *[{"ticket": "slow", "note": "c"}] * 9]))
    assert row_examples(file, ("ticket",)) == [Example("no login"), *[Example("slow")] * 4]
    assert row_examples(file, ("ticket", "note"))[:2] == [Example("no login", "a"), Example("slow", "c")]
    file.write_text(json.dumps({"ticket": "half \ud83d"}) + "\n")
    assert row_examples(file, ("ticket",)) == []
    file.write_text("[1]\nno JSON\n")
    assert row_examples(file, ("ticket",)) == []


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    for name in ("README.md", "validation.jsonl"):
        os.mkfifo(tmp_path / name)
    assert card_examples(tmp_path) == row_examples(tmp_path / "validation.jsonl", ("text",)) == []


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"# No metadata\n---\nwidget: [a]\n---\n",
        b"---\nwidget: [a]\n",
        b"---\n- a\n---\n",
        b"---\nwidget: a\n---\n",
        b"---\nwidget: [a\n---\n",
        b"---\nwidget: " + b"[" * 5000 + b"\n---\n",
        b"---\n\xff\x00\n---\n",
    ],
)
def test_a_card_that_cannot_be_read_has_no_examples(tmp_path, card):
    assert card_examples(tmp_path) == []
    (tmp_path / "README.md").write_bytes(card)
    assert card_examples(tmp_path) == []
