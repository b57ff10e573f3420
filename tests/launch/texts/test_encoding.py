"""How texts are encoded for a model: windows, and bounds of what its config.json says of them."""

import pytest

from cloze.launch.texts.encoding import Answering, Encoder, Truncation, windows, words_in
from cloze.pipeline.errors import UserError
from tests.pipeline import corpus


def test_windows_over_the_textbook_sentence():
    assert list(windows(12, 6, 3)) == [(0, 6), (3, 9), (6, 12)]
    assert list(windows(5, 6, 3)) == [(0, 5)] and list(windows(13, 6, 3))[-1] == (9, 13)


@pytest.mark.parametrize("field", ["max_length", "window_step", "max_answer_tokens"])
def test_windows_without_end_are_refused(field):
    with pytest.raises(UserError, match=f"cloze_answering.{field}: found 0, expected at least 1"):
        Answering(**{field: 0})


def test_truncated_texts_have_positions_and_room():
    with pytest.raises(UserError, match="cloze_truncation.max_length: found 65, expected at most 64, the model's pos"):
        Encoder(corpus.tokenizer(), 64, truncation=Truncation(65))
    with pytest.raises(UserError, match="cloze_truncation.max_length: found 2, expected at least 3"):
        Truncation(2)
    encoder = Encoder(corpus.tokenizer(), 64, truncation=Truncation(3))
    assert len(encoder.encode("the cat " * 9, "a cat " * 9, cut=True)) == 3


@pytest.mark.parametrize("note", [[], "x", 7, {"words": 5}, {"words": ["characters"]}, {"words": "bytes"}])
def test_words_of_another_kind_are_refused(note):
    assert words_in(None) is None and words_in({"words": "characters"}) == "characters"
    with pytest.raises(UserError, match="cloze_truncation: found"):
        words_in(note)
