"""Bounds of what a model's config.json says of how texts are read."""

import pytest

from cloze.launch.texts.settings import Answering, words_in
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize("field", ["max_length", "window_step", "max_answer_tokens"])
def test_windows_without_end_are_refused(field):
    with pytest.raises(UserError, match=f"cloze_answering.{field}: found 0, expected at least 1"):
        Answering(**{field: 0})


@pytest.mark.parametrize("note", [[], "x", 7, {"words": 5}, {"words": ["characters"]}, {"words": "bytes"}])
def test_words_of_another_kind_are_refused(note):
    assert words_in(None) is None and words_in({"words": "characters"}) == "characters"
    with pytest.raises(UserError, match="cloze_truncation: found"):
        words_in(note)
