"""Masking: counts, shares, what is never masked, and draws that depend on nothing but their key."""

import numpy as np
import pytest

from cloze.pipeline import ragged
from cloze.pipeline.config import MaskingConfig, SamplesConfig, SentencesConfig, SourceConfig, SplitConfig
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.records import Samples
from cloze.pipeline.samples.masking import KeyedDraws, Masker, MaskingRules, RateSchedule, StreamDraws
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.pipeline import corpus
from tests.pipeline.samples.test_building import SPECIAL

CONFIG = {
    "mode": "precomputed",
    "strategy": "token",
    "rate": 0.15,
    "mask_share": 0.8,
    "random_share": 0.1,
    "selection": "count",
    "random_from": "ordinary",
    "max_predictions_per_sequence": None,
    "span_p": 0.2,
    "max_span": 10,
}
VOCAB = 1000
CONTINUES = np.zeros(VOCAB, bool)
CONTINUES[600:] = True  # two fifths of the ids go on with a word


def make(lengths, seed=0) -> Samples:
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    offsets = ragged.to_offsets(lengths)
    ids = rng.integers(5, VOCAB, offsets[-1]).astype(np.uint16)
    middle = offsets[:-1] + lengths // 2
    ids[offsets[:-1]], ids[offsets[1:] - 1], ids[middle] = SPECIAL.classification, SPECIAL.separator, SPECIAL.separator
    return Samples(
        ids,
        offsets,
        (lengths // 2 + 1).astype(np.uint16),
        np.zeros(len(lengths), np.int8),
        np.zeros(len(lengths), np.uint64),
        np.zeros(len(lengths), np.uint16),
    )


def draw(samples, key=1, max_length=128, **changes):
    rules = MaskingRules({**CONFIG, **changes}, max_length, VOCAB, SPECIAL, CONTINUES)
    return Masker(rules, samples).draw(StreamDraws(key))


def flat(samples, masks):
    return np.repeat(samples.offsets[:-1], np.diff(masks.offsets)) + masks.positions


LENGTHS = np.random.default_rng(7).integers(5, 129, 3000)


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.8, 1.0])
def test_count_is_the_release_formula(rate):
    samples = make(LENGTHS)
    masks = draw(samples, rate=rate)
    wanted = np.maximum(1, np.rint(rate * LENGTHS))
    cap = round(rate * 128)
    assert np.array_equal(np.diff(masks.offsets), np.minimum(np.minimum(wanted, cap), LENGTHS - 3))


@pytest.mark.parametrize("selection", ["count", "independent"])
def test_each_sample_may_have_a_rate_of_its_own(selection):
    samples = make(np.full(4000, 103))
    rates = RateSchedule(0.4, 0.2, begin=1000, end=3000).at(np.arange(4000))
    rules = MaskingRules({**CONFIG, "selection": selection}, 128, VOCAB, SPECIAL, CONTINUES)
    counts = np.diff(Masker(rules, samples, rates=rates).draw(KeyedDraws(3, 0, np.arange(4000))).offsets)
    if selection == "count":  # the default cap follows the rate: 0.15's would be 19
        assert counts[:1000].tolist() == [41] * 1000 and counts[2000] == 31 and counts[3000:].tolist() == [21] * 1000
    else:
        shares = [counts[low : low + 500].mean() / 100 for low in (0, 500, 1750, 3000, 3500)]
        np.testing.assert_allclose(shares, [0.4, 0.4, 0.3, 0.2, 0.2], atol=0.01)
    same = Masker(rules, samples).draw(KeyedDraws(3, 0, np.arange(4000)))
    constant = Masker(rules, samples, rates=np.full(4000, 0.15)).draw(KeyedDraws(3, 0, np.arange(4000)))
    assert np.array_equal(same.positions, constant.positions) and np.array_equal(same.ids, constant.ids)


def test_the_cap_caps():
    masks = draw(make(LENGTHS), max_predictions_per_sequence=5)
    assert np.diff(masks.offsets).max() == 5


@pytest.mark.parametrize(
    ("strategy", "selection"),
    [
        ("token", "count"),
        ("whole_word", "count"),
        ("span", "count"),
        ("token", "independent"),
        ("whole_word", "independent"),
    ],
)
def test_never_special_always_ascending(strategy, selection):
    samples = make(LENGTHS)
    masks = draw(samples, strategy=strategy, selection=selection)
    assert (samples.input_ids[flat(samples, masks)] >= 5).all()
    assert (np.diff(flat(samples, masks)) > 0).all()
    assert abs(len(masks.ids) / len(samples.input_ids) - 0.15) < 0.012


def test_every_position_is_equally_likely_and_sets_differ():
    samples = make(np.full(4000, 103))
    masks = draw(samples)
    counts = np.bincount(masks.positions, minlength=103)
    ordinary = np.delete(counts, [0, 51, 102])
    assert counts[[0, 51, 102]].tolist() == [0, 0, 0]
    expected = ordinary.mean()
    assert np.abs(ordinary - expected).max() < 5 * expected**0.5
    assert not np.array_equal(masks.positions, draw(samples, key=2).positions)


def test_pairs_of_positions_are_equally_likely():
    """Subsets, not only positions: two of four candidates must make each of six pairs alike."""
    samples = make(np.full(12000, 7))
    masks = draw(samples, rate=2 / 7, max_length=7)
    pairs = masks.positions.reshape(-1, 2)
    codes, counts = np.unique(pairs[:, 0].astype(int) * 10 + pairs[:, 1], return_counts=True)
    assert len(codes) == 6 and np.abs(counts - 2000).max() < 5 * 2000**0.5


@pytest.mark.parametrize("random_from", ["ordinary", "ordinary_other", "all"])
def test_shares_and_random_ids(random_from):
    samples = make(np.full(6000, 128))
    masks = draw(samples, random_from=random_from)
    originals = samples.input_ids[flat(samples, masks)]
    by_mask, kept = masks.ids == SPECIAL.mask, masks.ids == originals
    assert abs(by_mask.mean() - 0.8) < 0.01
    assert abs(kept.mean() - 0.1) < 0.01
    random = masks.ids[~by_mask & ~kept]
    assert abs(len(random) / len(masks.ids) - 0.1) < 0.01
    if random_from == "all":
        assert random.min() < 5
    else:
        assert random.min() >= 5
    counts = np.bincount(random, minlength=VOCAB)[5:]
    assert np.abs(counts - counts.mean()).max() < 6 * counts.mean() ** 0.5
    if random_from == "ordinary_other":
        nothing_kept = draw(samples, random_from=random_from, mask_share=0.0, random_share=1.0)
        assert (nothing_kept.ids != originals[: len(nothing_kept.ids)]).all()


def test_whole_words_are_masked_whole_within_the_count():
    samples = make(LENGTHS)
    masks = draw(samples, strategy="whole_word")
    masked = np.zeros(len(samples.input_ids), bool)
    masked[flat(samples, masks)] = True
    ids = samples.input_ids.astype(int)
    inside = CONTINUES[ids[1:]] & (ids[:-1] >= 5) & (ids[1:] >= 5)
    assert (masked[1:][inside] == masked[:-1][inside]).all()
    wanted = np.minimum(np.maximum(1, np.rint(0.15 * LENGTHS)), 19)
    assert (np.diff(masks.offsets) <= wanted).all() and np.diff(masks.offsets).sum() > 0.9 * wanted.sum()


def test_spans_are_runs_replaced_alike():
    samples = make(np.full(3000, 128))
    spans, tokens = draw(samples, strategy="span"), draw(samples)
    assert np.array_equal(np.diff(spans.offsets), np.diff(tokens.offsets))
    runs = lambda masks: (np.diff(flat(samples, masks)) > 1).sum() + 1  # noqa: E731
    assert runs(spans) < 0.45 * runs(tokens)
    neighbours = np.flatnonzero(np.diff(flat(samples, spans)) == 1)
    is_mask = spans.ids == SPECIAL.mask
    assert (is_mask[neighbours] == is_mask[neighbours + 1]).mean() > 0.9


@pytest.mark.parametrize(("span_p", "max_span"), [(0.2, 10), (0.5, 3)])
def test_spans_are_whole_words_of_geometric_number(span_p, max_span):
    """Few spans in long samples, so that hardly two meet; the last of a sample is cut at the count."""
    samples = make(np.full(40, 30_000))
    masks = draw(samples, strategy="span", rate=0.01, max_length=30_000, span_p=span_p, max_span=max_span)
    places = flat(samples, masks)
    first = np.flatnonzero(np.diff(places, prepend=-2) > 1)
    last = np.append(first[1:], len(places)) - 1
    ids = samples.input_ids.astype(int)
    begins = ~CONTINUES[ids] | (ids < 5)
    begins[1:] |= ids[:-1] < 5
    assert begins[places[first]].all()
    assert (~begins[places[last] + 1]).sum() <= len(samples)
    words = np.add.reduceat(begins[places].astype(int), first)
    shares = np.bincount(words, minlength=max_span + 1)[1 : max_span + 1] / len(words)
    expected = (1 - span_p) ** np.arange(max_span)
    assert np.abs(shares - expected / expected.sum()).max() < 0.04 and shares.sum() > 0.95


def test_independent_selection_may_leave_a_sample_empty():
    samples = make(np.full(2000, 8))
    counts = np.diff(draw(samples, selection="independent").offsets)
    assert (counts == 0).any() and abs(counts.mean() / 5 - 0.15) < 0.02


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_dynamic_draws_do_not_depend_on_the_batch(strategy):
    samples = make(LENGTHS[:200])
    rules = MaskingRules({**CONFIG, "strategy": strategy}, 128, VOCAB, SPECIAL, CONTINUES)
    indices = np.arange(1000, 1200)
    whole = Masker(rules, samples).draw(KeyedDraws(1, 2, indices))
    for number in (0, 7, 199):
        masks = Masker(rules, samples.part(number, number + 1)).draw(KeyedDraws(1, 2, indices[[number]]))
        low, high = whole.offsets[number], whole.offsets[number + 1]
        assert np.array_equal(masks.positions, whole.positions[low:high])
        assert np.array_equal(masks.ids, whole.ids[low:high])
    other = Masker(rules, samples).draw(KeyedDraws(1, 3, indices))
    assert not np.array_equal(other.positions, whole.positions)


def test_keyed_draws_are_uniform():
    rows = np.repeat(np.arange(500), 100)
    found = KeyedDraws(0, 0, np.arange(500)).uniform(rows, 0)
    assert abs(found.mean() - 0.5) < 0.005 and abs(found.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("form", "splitter", "objective"),
    [("lines", "lines", "full_sentences"), ("lines", "lines", "next_sentence"), ("file", "none", "full_sentences")],
)
def test_words_of_byte_level_tokens_begin_at_line_breaks_and_sentences(tmp_path, form, splitter, objective):
    """A word a line, none with a space before it: all of them would be one word, which is too long to be masked."""
    byte_tokenizer(["kalo", "mi"] * 2).save(tmp_path / "tokenizer")
    for name in "abcdefgh":
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("\n".join(["kalomi"] * (900 + ord(name))))  # two tokens each
    manifest = prepare(
        corpus.config(
            tmp_path,
            [tmp_path / "in"],
            source=SourceConfig(format=form),
            sentences=SentencesConfig(splitter=splitter),
            samples=SamplesConfig(objective=objective, cross_documents=False),
            split=SplitConfig(validation=0, test=0),
            masking=MaskingConfig(strategy="whole_word"),
        )
    )
    reader = ShardReader(manifest.folder)
    samples, masks = reader.take(np.arange(reader.num_samples), 0)
    masked = np.zeros(len(samples.input_ids), bool)
    masked[flat(samples, masks)] = True
    assert 0.12 < masked.mean() < 0.16
    kalo, mi = Tokenizer.from_folder(tmp_path / "tokenizer").encode("kalomi")
    whole = (samples.input_ids[:-1] == kalo) & (samples.input_ids[1:] == mi)
    assert whole.sum() > 5000 and (masked[:-1][whole] == masked[1:][whole]).all()


def test_words_of_byte_level_tokens_begin_at_white_space_of_any_kind():
    spaces = " \t\u00a0\u3000"
    tokenizer = byte_tokenizer([f"ka{space}mi" for space in spaces] * 3)
    for space in spaces:
        begins = ~tokenizer.continues_word[tokenizer.encode(f"ka{space}mi")]
        assert begins[1:].sum() == 1, repr(space)
