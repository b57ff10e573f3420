"""Special tokens around texts: arrays of many rows and single texts in Python get the same ids."""

import numpy as np

from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.samples.assembly import assemble

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
