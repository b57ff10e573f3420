"""How texts are encoded for a model: windows, and room for what is truncated."""

import pytest

from cloze.launch.texts.encoding import TextEncoder, windows
from cloze.launch.texts.settings import Truncation
from cloze.pipeline.errors import UserError
from tests.pipeline import corpus


def test_windows_over_the_textbook_sentence():
    assert list(windows(12, 6, 3)) == [(0, 6), (3, 9), (6, 12)]
    assert list(windows(5, 6, 3)) == [(0, 5)] and list(windows(13, 6, 3))[-1] == (9, 13)


def test_truncated_texts_have_positions_and_room():
    with pytest.raises(UserError, match="cloze_truncation.max_length: found 65, expected at most 64, the model's pos"):
        TextEncoder(corpus.tokenizer(), 64, truncation=Truncation(65))
    with pytest.raises(UserError, match="cloze_truncation.max_length: found 2, expected at least 3"):
        Truncation(2)
    encoder = TextEncoder(corpus.tokenizer(), 64, truncation=Truncation(3))
    assert len(encoder.encode("the cat " * 9, "a cat " * 9, cut=True)) == 3
