"""Special tokens around texts: arrays of many rows and single texts in Python get the same ids."""

import numpy as np
import pytest

from cloze.launch.texts.encoding import Encoder, Truncation
from cloze.launch.texts.sequences import build_sequences
from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.samples.assembly import assemble
from tests.launch.finetune.small import WORDS, make_tokenizer

SPECIAL = SpecialTokens(pad=0, unknown=1, classification=2, separator=3, mask=4)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_one_text_two_texts_and_an_empty_second_one():
    tokens = np.arange(10, 20, dtype=np.uint16)
    a, b = (rows(0, 3, 5), rows(2, 1, 2)), (rows(7, 0, 0), rows(3, 0, 0))
    ids, offsets, begins = assemble(tokens, [[a], [b]], SPECIAL, has_second=np.array([True, False, True]))
    assert ids.dtype == np.uint16
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == [
        [2, 10, 11, 3, 17, 18, 19, 3],
        [2, 13, 3],
        [2, 15, 16, 3, 3],
    ]
    assert begins.tolist() == [4, 3, 4]


def test_a_text_of_several_ranges():
    tokens = np.arange(10, 20)
    ids, offsets, begins = assemble(tokens, [[(rows(0, 4), rows(2, 0)), (rows(8, 9), rows(1, 1))]], SPECIAL)
    assert ids.tolist() == [2, 10, 11, 18, 3, 2, 19, 3] and offsets.tolist() == [0, 5, 8] == [0, *begins.cumsum()]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("keep", ["head", "tail", "head_tail"])
def test_arrays_and_single_texts_get_the_same_ids(pairs, keep):
    """Of all lengths around the limit, cut or not."""
    tokenizer = make_tokenizer()
    generator = np.random.default_rng(0)
    texts = [[" ".join(generator.choice(WORDS, count)) for count in generator.integers(1, 24, 60)] for _ in range(2)]
    truncation = Truncation(16, keep, head_tokens=5)
    second = texts[1] if pairs else None
    sequences, cut = build_sequences(tokenizer, texts[0], second, truncation)
    encoder = Encoder(tokenizer, 16, truncation=truncation)
    single = [encoder.encode(text, second and second[number], cut=True) for number, text in enumerate(texts[0])]
    assert sequences.input_ids.tolist() == [token for each in single for token in each.ids]
    assert sequences.lengths.tolist() == [len(each) for each in single]
    assert sequences.segment_b_start.tolist() == [each.segment_b_start for each in single]
    assert cut.tokens == sum(each.cut_tokens for each in single) > 0
