"""Building samples: every token in its place, none lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.pipeline import ragged
from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.samples.building import Documents, SampleBuilder

SPECIAL = SpecialTokens(pad=0, unknown=1, classification=2, separator=3, mask=4)
CONFIG = {
    "objective": "next_sentence",
    "random_share": 0.5,
    "short_share": 0.1,
    "cross_documents": True,
    "single_share": 0.0,
    "pair_sets": 1,
    "min_document_tokens": 1,
}
OBJECTIVES = ["next_sentence", "sentence_order", "full_sentences", "single_sentences"]
LENGTHS = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=12), min_size=1, max_size=12)


def make(lengths: list[list[int]]) -> Documents:
    """Every token is unique, from 10 on, so that a sample tells where its tokens come from."""
    sentences = np.array([size for document in lengths for size in document], np.int64)
    count = int(sentences.sum())
    return Documents(
        tokens=np.arange(10, 10 + count, dtype=np.uint32),
        sentence_offsets=ragged.to_offsets(sentences),
        document_offsets=ragged.to_offsets(np.array([len(document) for document in lengths])),
        ids=np.arange(100, 100 + len(lengths), dtype=np.uint64),
        keys=np.arange(len(lengths), dtype=np.uint64),
        sources=np.zeros(len(lengths), np.uint16),
    )


def build(documents: Documents, max_length: int = 32, key=(1,), **changes):
    return SampleBuilder({**CONFIG, **changes}, max_length, SPECIAL).build(documents, key)


def segments(samples) -> list[tuple[list[int], list[int], int]]:
    found = []
    for number, (low, high) in enumerate(zip(samples.offsets[:-1], samples.offsets[1:], strict=True)):
        ids = samples.input_ids[low:high].tolist()
        start = int(samples.segment_b_start[number])
        assert ids[0] == SPECIAL.classification and ids[-1] == SPECIAL.separator and ids[start - 1] == SPECIAL.separator
        found.append((ids[1 : start - 1], ids[start:-1], int(samples.next_sentence_label[number])))
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("crossing", [True, False])
@settings(max_examples=60)
@given(lengths=LENGTHS, max_length=st.integers(8, 64), seed=st.integers(0, 1000))
def test_every_token_is_in_one_sample_besides_borrowed_ones(objective, crossing, lengths, max_length, seed):
    documents = make(lengths)
    samples, counts = build(documents, max_length, (seed,), objective=objective, cross_documents=crossing)
    assert samples.lengths.max() <= max_length
    borrows = objective == "next_sentence"
    own = [token for a, b, label in segments(samples) for token in (a if borrows and label == 1 else a + b)]
    own = [token for token in own if token != SPECIAL.separator]
    if objective == "sentence_order":
        own.sort()
    assert own == documents.tokens.tolist()  # in the order of the text, and each once
    assert counts["tokens_in"] + counts["tokens_borrowed"] - counts["tokens_left_out"] == counts["tokens_out"]
    assert counts["tokens_out"] == sum(len(a) + len(b) - (a + b).count(3) for a, b, _ in segments(samples))


@settings(max_examples=60)
@given(lengths=LENGTHS.filter(lambda lengths: len(lengths) > 1), seed=st.integers(0, 1000))
def test_random_b_is_of_another_document_and_real_b_follows(lengths, seed):
    documents = make(lengths)
    samples, _ = build(documents, 32, (seed,))
    bounds = documents.sentence_offsets[documents.document_offsets]
    owner = np.searchsorted(bounds, documents.tokens.astype(np.int64) - 10, side="right") - 1
    for number, (a, b, label) in enumerate(segments(samples)):
        assert b and label in (0, 1)
        owners = {int(owner[token - 10]) for token in a}
        assert owners == {int(samples.document[number]) - 100}
        if label == 1:
            assert owners.isdisjoint(int(owner[token - 10]) for token in b)
        else:
            assert b[0] == a[-1] + 1
            assert {int(owner[token - 10]) for token in b} == owners


def test_half_of_the_pairs_are_random_and_a_tenth_short():
    documents = make([[12] * 40 for _ in range(300)])
    samples, _ = build(documents, 128)
    labels = samples.next_sentence_label
    assert abs((labels == 1).mean() - 0.5) < 0.04
    # an eighth or so is short: the tenth that aims lower, and the ends of documents
    assert 0.05 < (samples.lengths < 110).mean() < 0.3
    cuts = {len(a) // 12 for a, b, label in segments(samples) if label == 0 and len(a) % 12 == 0}
    assert len(cuts) >= 7  # the cut is anywhere between sentences


def test_one_document_gets_no_random_b():
    samples, counts = build(make([[5, 6, 7, 8, 9, 10]]))
    assert set(samples.next_sentence_label.tolist()) <= {0, -100} and counts["tokens_borrowed"] == 0


def test_no_b_is_random_with_a_share_of_0():
    """Not for documents of one sentence either, which have no other."""
    samples, counts = build(make([[5]] * 20 + [[5, 6, 7]] * 5), random_share=0.0, short_share=0.0)
    assert samples.next_sentence_label.tolist() == [-100] * 20 + [0] * 5 and counts["tokens_borrowed"] == 0


def test_copies_of_a_document_are_no_partners():
    documents = make([[9, 9, 9], [9, 9, 9]])
    copies = replace(documents, keys=np.zeros(2, np.uint64))
    assert 1 not in build(copies)[0].next_sentence_label


def test_sentence_order_swaps_neighbours():
    samples, _ = build(make([[10] * 30 for _ in range(100)]), 64, objective="sentence_order")
    found = segments(samples)
    assert abs(np.mean([label == 1 for _, b, label in found if b]) - 0.5) < 0.06
    for a, b, label in found:
        assert (label == 1 and a[0] == b[-1] + 1) or (label == 0 and b[0] == a[-1] + 1) or not b


def test_some_documents_give_single_sentences():
    lengths = [[5, 40, 5]] * 300
    documents = make(lengths)
    samples, counts = build(documents, 32, objective="full_sentences", cross_documents=False, single_share=0.3)
    own = [a for a, _, _ in segments(samples)]
    assert [token for a in own for token in a] == documents.tokens.tolist() and counts["tokens_out"] == 15000
    sizes = {
        number: tuple(len(a) for a, owner in zip(own, samples.document, strict=True) if owner == 100 + number)
        for number in range(300)
    }
    # By itself each sentence, of which the long one is cut; or packed, as ever.
    assert set(sizes.values()) == {(5, 30, 10, 5), (5, 30, 15)}
    share = sum(size == (5, 30, 10, 5) for size in sizes.values()) / 300
    assert abs(share - 0.3) < 0.08
    again, _ = build(documents, 32, (2,), objective="full_sentences", cross_documents=False, single_share=0.3)
    assert not np.array_equal(again.offsets, samples.offsets), "another set of samples draws other documents"


def test_full_sentences_put_a_separator_between_documents_and_fill_up():
    samples, _ = build(make([[5, 5], [5, 5], [5, 5]]), 23, objective="full_sentences")
    assert [len(a) for a, _, _ in segments(samples)] == [16, 16]  # the next sentence would make it 22 of 21
    assert [a.index(3) for a, _, _ in segments(samples)] == [10, 5]
    assert samples.next_sentence_label.tolist() == [-100, -100]
    alone, _ = build(make([[5, 5], [5, 5]]), 23, objective="full_sentences", cross_documents=False)
    assert [a for a, _, _ in segments(alone)] == [list(range(10, 20)), list(range(20, 30))]


def test_given_pairs_are_kept_swapped_or_cut_at_the_end_of_the_longer():
    documents = make([[3, 4], [20, 30], [2, 40]])
    samples, counts = build(documents, 23, objective="given_pairs", random_share=0.0)
    assert [(len(a), len(b), label) for a, b, label in segments(samples)] == [(3, 4, 0), (10, 10, 0), (2, 18, 0)]
    assert counts["tokens_left_out"] == 30 + 22
    many = make([[3, 4]] * 400)
    swapped, counts = build(many, 23, objective="given_pairs")
    assert abs((swapped.next_sentence_label == 1).mean() - 0.5) < 0.1
    assert counts["tokens_in"] + counts["tokens_borrowed"] - counts["tokens_left_out"] == counts["tokens_out"]
    given, _ = build(many, 23, objective="given_pairs", random_share=0.0)
    for (_, b, label), (_, own, _) in zip(segments(swapped), segments(given), strict=True):
        assert (b == own) == (label == 0)


PAIRS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)).filter(any).map(list), min_size=1, max_size=12)


@settings(max_examples=100)
@given(lengths=PAIRS, max_length=st.integers(8, 64), share=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 1000))
def test_every_token_of_given_pairs_is_shown_or_counted(lengths, max_length, share, seed):
    documents = make(lengths)
    samples, counts = build(documents, max_length, (seed,), objective="given_pairs", random_share=share)
    bounds = documents.sentence_offsets.tolist()
    parts = [documents.tokens[low:high].tolist() for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    own, borrowed = 0, 0
    for number, (a, b, label) in enumerate(segments(samples)):
        first, second = parts[2 * number : 2 * number + 2]
        others = [second] if label == 0 else parts[1 : 2 * number : 2] + parts[2 * number + 3 :: 2]
        assert len(a) + len(b) <= max_length - 3
        assert a == first[: len(a)] and any(b == part[: len(b)] for part in others)
        own += len(a) + len(b) * (label == 0)
        borrowed += len(b) * (label == 1)
    assert len(samples) == len(lengths)
    assert counts == {
        "tokens_in": len(documents.tokens),
        "tokens_out": own + borrowed,
        "tokens_borrowed": borrowed,
        "tokens_left_out": len(documents.tokens) - own,
    }


def test_draws_depend_on_the_key_alone():
    documents = make([[7, 9, 4] * 6 for _ in range(20)])
    first, again, other = (build(documents, 32, key)[0] for key in ((1, "a"), (1, "a"), (2, "a")))
    assert np.array_equal(first.input_ids, again.input_ids)
    assert not np.array_equal(first.offsets, other.offsets) or not np.array_equal(first.input_ids, other.input_ids)
