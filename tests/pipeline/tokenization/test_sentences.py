"""Sentences: where they end, and that nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline.tokenization.sentences import SPLITTERS, split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Smith and Dr. Who met St. John. They left.", ["Mr. Smith and Dr. Who met St. John.", "They left."]),
        ("J. R. Ewing came. So did I. Then he left.", ["J. R. Ewing came.", "So did I.", "Then he left."]),
        ('"Stop!" he said. "Why?" She ran.', ['"Stop!" he said.', '"Why?"', "She ran."]),
        ("It cost 3.5 dollars. Then 4. see e.g. This.", ["It cost 3.5 dollars.", "Then 4. see e.g. This."]),
        ("Wait... What?! No… Yes.", ["Wait...", "What?!", "No…", "Yes."]),
        ("A heading\n\nA text that\nis wrapped. More.", ["A heading", "A text that\nis wrapped.", "More."]),
        ("你好。我很好！「是吗？」他说。", ["你好。", "我很好！", "「是吗？」", "他说。"]),
        ("今日は。明日も…", ["今日は。", "明日も…"]),
        ("“Curly.” Then ‘single.’ End.", ["“Curly.”", "Then ‘single.’", "End."]),
        ("See Mr.\n\nNew paragraph.", ["See Mr.", "New paragraph."]),
    ],
)
def test_rules(text, expected):
    assert split(text) == expected


def test_lines_and_paragraphs():
    assert split("One. Two.\nThree", "lines") == ["One. Two.", "Three"]
    assert split("One. Two.\nThree\n \nFour", "none") == ["One. Two.\nThree", "Four"]


def test_long_runs_of_white_space_and_marks():
    assert split("One." + " " * 5000 + "Two." + "\n" * 3000 + "Three" + "!" * 500 + " Four") == [
        "One.",
        "Two.",
        "Three" + "!" * 500,
        "Four",
    ]


@given(st.text(alphabet=st.sampled_from("aB.!?…。」’\"' \n\t中é0"), max_size=80), st.sampled_from(sorted(SPLITTERS)))
def test_boundaries_ascend_between_characters_and_only_where_words_end(text, splitter):
    data = text.encode()
    bounds = SPLITTERS[splitter](data).tolist()
    assert bounds == sorted(set(bounds))
    for bound in bounds:
        assert 0 < bound <= len(data)
        data[:bound].decode()
        # behind white space or a mark, so that no word is cut
        assert not data[:bound].decode()[-1].isalnum()
