"""Batches: the same samples for any number of ranks, each once an epoch, from any position."""

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.pipeline.config import MaskingConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.batches import BatchPhases, BatchStream, evaluation_batches, growing_batches
from cloze.pipeline.loading.collate import pad
from cloze.pipeline.loading.streams import RunMasking, SampleStreams
from cloze.pipeline.samples.masking import DynamicMasking, RateSchedule
from cloze.pipeline.shards import shard_file
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus
from tests.pipeline.loading.plain_order import positions

pytestmark = pytest.mark.usefixtures("small_units")


def take(
    data,
    count,
    rank=0,
    world_size=1,
    size=24,
    micro=4,
    seed=1,
    start=0,
    streams=24,
    warmup=None,
    rate=None,
    next_tokens_until=0,
    causal_share=Fraction(0),
):
    stream = BatchStream(
        ShardReader(data),
        global_batch_size=size,
        micro_batch_size=micro,
        rank=rank,
        world_size=world_size,
        streams=streams,
        seed=seed,
        samples_consumed=start,
        warmup=warmup,
        masking=RunMasking(rate=rate, next_tokens_until=next_tokens_until, causal_share=causal_share),
    )
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def parts_of(data, count, world_size, **options):
    """The batches of all ranks, each a list over ranks."""
    return list(zip(*(take(data, count, rank, world_size, **options) for rank in range(world_size)), strict=True))


def together(parts) -> np.ndarray:
    """The samples of a global batch, sorted."""
    return np.sort(np.concatenate([part.indices for part in parts]))


def sequences(batch) -> list[tuple]:
    offsets = batch["sequence_offsets"].tolist()
    return [tuple(batch["input_ids"][a:b].tolist()) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def test_the_samples_of_an_epoch_are_all_samples(data):
    reader = ShardReader(data)
    count = -(-2 * reader.num_samples // 24)
    taken = parts_of(data, count, 3, streams=8, micro=2)
    for epoch in range(2):
        whole = [
            batch
            for batch in taken
            if batch[0].position >= epoch * reader.num_samples
            and batch[0].position + 24 <= (epoch + 1) * reader.num_samples
        ]
        assert len(whole) > 5
        within = np.concatenate([together(parts) for parts in whole])
        assert len(np.unique(within)) == len(within)


@pytest.mark.parametrize("streams", [1, 8, 24])
def test_the_order_is_a_function_of_blocks_lengths_streams_and_seed(data, streams):
    reader = ShardReader(data)
    lengths = reader.take(np.arange(reader.num_samples))[0].lengths
    expected = positions(reader.block_sizes, lengths, reader.manifest.max_length, streams, 5, epochs=2)
    count = len(expected) // 24
    found = [batch.indices for batch in take(data, count, seed=5, streams=streams)]
    assert all(
        np.array_equal(np.sort(indices), np.sort(expected[24 * n : 24 * (n + 1)])) for n, indices in enumerate(found)
    )


@pytest.mark.parametrize(("world_size", "streams"), [(2, 1), (3, 6), (4, 6), (5, 60), (7, 60), (8, 6), (60, 60)])
def test_the_union_of_ranks_is_the_global_batch(data, world_size, streams):
    """Also where the world size does not divide the streams, which then are read by two ranks, and over epochs."""
    size = math.lcm(60, world_size)
    count = ShardReader(data).num_samples // size + 3
    micro = next(m for m in (3, 2, 1) if size // world_size % m == 0)
    whole = take(data, count, size=size, micro=micro, streams=streams)
    for parts, alone in zip(
        parts_of(data, count, world_size, size=size, micro=micro, streams=streams), whole, strict=True
    ):
        assert np.array_equal(together(parts), np.sort(alone.indices))
        assert all(len(part.indices) == size // world_size for part in parts)
        for name in ("num_tokens", "num_masked", "num_pairs"):
            assert sum(getattr(part, name) for part in parts) == getattr(alone, name)
        assert all((part.position, part.epoch) == (alone.position, alone.epoch) for part in parts)


@pytest.mark.parametrize("until", [60, 72, 1])  # within a batch, which then has next tokens too, and where one begins
def test_next_tokens_come_first_and_only_what_is_predicted_differs(folder, until):
    """The samples are those of a run without; batches with masks have the same bytes, from any start on."""
    data = dynamic(folder)
    whole, plain = take(data, 6, next_tokens_until=until), take(data, 6)
    for batch, masked in zip(whole, plain, strict=True):
        assert np.array_equal(batch.indices, masked.indices) and batch.num_tokens == masked.num_tokens
        for micro, other in zip(batch.micro_batches, masked.micro_batches, strict=True):
            if batch.position >= until:
                assert micro.keys() == other.keys() and "causal" not in micro
                assert all(np.array_equal(micro[name], other[name]) for name in micro)
                continue
            original = other["input_ids"].clone()
            original[other["masked_positions"]] = other["labels"]
            assert micro["causal"] is True and torch.equal(micro["input_ids"], original)
            offsets = micro["sequence_offsets"].tolist()
            pairs = [
                (at, original[at + 1].item())
                for low, high in itertools.pairwise(offsets)
                for at in range(low, high - 1)
            ]
            assert list(zip(micro["masked_positions"].tolist(), micro["labels"].tolist(), strict=True)) == pairs
            assert (micro["next_sentence_label"] == -100).all()
        if batch.position < until:
            assert batch.num_masked == batch.num_tokens - 24 and batch.num_pairs == 0
    assert [batch.position for batch in whole if "causal" in batch.micro_batches[0]] == list(range(0, until, 24))
    with pytest.raises(UserError, match="batch: found next tokens"):
        pad(whole[0].micro_batches[0], 64)
    for left, right in zip(take(data, 4, start=48, next_tokens_until=until), whole[2:], strict=True):
        assert all(
            torch.equal(a["labels"], b["labels"]) for a, b in zip(left.micro_batches, right.micro_batches, strict=True)
        )


def test_a_share_of_samples_has_next_tokens_the_same_for_any_split_and_start(folder):
    """Micro-batches have samples of one kind; those with masks have the ids and labels of a run without."""
    data, share = dynamic(folder), Fraction(1, 4)
    reader, plain, found = ShardReader(data), take(data, 6), []
    masked_ids = []
    for whole in plain:
        ids = [each for micro_batch in whole.micro_batches for each in sequences(micro_batch)]
        masked_ids.append(dict(zip(whole.indices.tolist(), ids, strict=True)))
    for world_size, micro, first in ((1, 6, 0), (1, 2, 0), (2, 3, 0), (3, 2, 4)):
        options = {"micro": micro, "start": 24 * first, "causal_share": share}
        chosen = []
        for number, parts in enumerate(parts_of(data, 6 - first, world_size, **options), first):
            assert np.array_equal(together(parts), np.sort(plain[number].indices))
            assert sum(part.num_tokens for part in parts) == plain[number].num_tokens
            chosen.append(set())
            for part in parts:
                assert [micro_batch.get("causal", False) for micro_batch in part.micro_batches] == sorted(
                    ("causal" in micro_batch for micro_batch in part.micro_batches), reverse=True
                )
                assert part.num_masked == sum(len(micro_batch["labels"]) for micro_batch in part.micro_batches)
                pairs = sum(int((each["next_sentence_label"] != -100).sum()) for each in part.micro_batches)
                assert part.num_pairs == pairs
                for micro_batch, some in zip(part.micro_batches, part.indices.reshape(-1, micro), strict=True):
                    lengths = micro_batch["sequence_offsets"].diff()
                    assert (lengths.diff() >= 0).all(), "sorted by length"
                    if "causal" not in micro_batch:
                        assert sequences(micro_batch) == [masked_ids[number][index] for index in some.tolist()]
                        continue
                    chosen[-1] |= set(some.tolist())
                    originals = corpus.rows(reader.take(some, None)[0])
                    assert sequences(micro_batch) == [tuple(ids) for ids in originals]
                    assert micro_batch["labels"].tolist() == [token for ids in originals for token in ids[1:]]
            assert len(chosen[-1]) == 6
        found.append(chosen)
    assert found[0] == found[1] == found[2] and found[3] == found[0][4:]
    with pytest.raises(UserError, match="causal_share: found 1/4 of 24 samples, expected a multiple of micro"):
        take(data, 1, causal_share=share)


@pytest.mark.parametrize("until", [60, 72])
def test_a_share_may_end_before_the_run(folder, until):
    """The batches before are those of a run with the share all along, those after of one without."""
    data, half = dynamic(folder), {"causal_share": Fraction(1, 2)}
    found, shared, plain = take(data, 6, next_tokens_until=until, **half), take(data, 6, **half), take(data, 6)
    for batch, before, after in zip(found, shared, plain, strict=True):
        expected = before if batch.position < until else after
        assert batch.num_masked == expected.num_masked and np.array_equal(batch.indices, expected.indices)
        for mine, theirs in zip(batch.micro_batches, expected.micro_batches, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert ["causal" in batch.micro_batches[0] for batch in found] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("until", "share", "mean"),
    [
        (0, Fraction(0), 0),
        (25, Fraction(0), 0.25),
        (0, Fraction(1, 4), 0.25),
        (50, Fraction(1, 4), 0.125),
        (200, Fraction(1, 4), 0.25),
    ],
)
def test_the_mean_share_of_a_run(until, share, mean):
    masking = RunMasking(next_tokens_until=until, causal_share=share)
    shares = [float(masking.causal_at(position)) for position in range(100)]
    assert masking.mean_causal_share(100) == mean == np.mean(shares)


def test_which_samples_have_next_tokens_has_nothing_to_do_with_their_lengths(data):
    """Lengths alternate along a stream, so that every second sample would be a short one."""
    lengths = ([], [])
    for batch in take(data, 60, streams=1, micro=12, causal_share=Fraction(1, 2)):
        for micro, longer in zip(batch.micro_batches, lengths, strict=True):
            longer += micro["sequence_offsets"].diff().tolist()
    means, deviation = [np.mean(each) for each in lengths], np.std(lengths[0] + lengths[1])
    assert abs(means[0] - means[1]) < 3 * deviation * np.sqrt(2 / len(lengths[0]))


@given(
    start=st.integers(0, 2000),
    seek=st.integers(0, 3),
    world_size=st.sampled_from([1, 3, 4, 8]),
    streams=st.sampled_from([1, 8, 24]),
)
@settings(max_examples=12, deadline=None)
def test_a_resume_at_any_position_with_another_world_size_goes_on(data, start, seek, world_size, streams):
    """`start` need not be where a batch of the run began: the streams then stand at different numbers."""
    whole = take(data, seek + 1, start=start, streams=streams, micro=24)[seek]
    (parts,) = parts_of(data, 1, world_size, start=start + 24 * seek, streams=streams, micro=1)
    assert np.array_equal(together(parts), np.sort(whole.indices))


def test_ranks_share_a_global_batch(data):
    alone = take(data, 5)
    for world_size in (2, 3):
        for parts, whole in zip(parts_of(data, 5, world_size), alone, strict=True):
            found = [s for part in parts for micro in part.micro_batches for s in sequences(micro)]
            assert sorted(found) == sorted(s for micro in whole.micro_batches for s in sequences(micro))
            assert all(len(part.micro_batches) == 24 // (4 * world_size) for part in parts)


@pytest.mark.parametrize("masks", ["stored", "drawn"])
def test_a_rank_reads_and_masks_its_own_share_alone(folder, data, masks, monkeypatch):
    """Law 7: whatever the number of ranks, the blocks that each decodes and the samples that it masks are its share and
    at most a stream's beside."""
    if masks == "drawn":
        data = dynamic(folder)
    streams, epochs = 24, 3
    samples = ShardReader(data).num_samples
    decoded, drawn = [], []
    decode, draw = ShardReader._decode, DynamicMasking.draw
    monkeypatch.setattr(
        ShardReader,
        "_decode",
        lambda reader, block, *rest: (decoded.append(int(reader.block_sizes[block])), decode(reader, block, *rest))[1],
    )
    monkeypatch.setattr(
        DynamicMasking, "draw", lambda self, some, *rest: (drawn.append(len(some)), draw(self, some, *rest))[1]
    )
    count = epochs * samples // 24
    costs = {}
    for world_size in (1, 2, 8, 24):
        ranks = []
        for rank in range(0, world_size, max(1, world_size // 4)):
            reader, position = SampleStreams(ShardReader(data), streams, 1), 0
            own = range(rank * streams // world_size, (rank + 1) * streams // world_size)
            decoded.clear(), drawn.clear()
            for _ in range(count):
                reader.read(own, position, 1)
                position += 24
            ranks.append((sum(decoded), sum(drawn)))
        costs[world_size] = np.mean(ranks, axis=0) * world_size / (count * 24)
    blocks = len(ShardReader(data).block_sizes) / streams  # of a stream and epoch: one more is on its cuts
    assert blocks > 3
    for cost, masked in costs.values():
        assert cost <= 1.1 * (blocks + 1) / blocks + blocks * 24 / count / 24
        assert masked == 0 if masks == "stored" else masked < 1.2
    assert costs[24][0] <= 1.3 * costs[1][0]


def test_a_batch_that_grows_is_the_same_for_any_ranks_and_from_any_step(data):
    warmup = growing_batches(initial=8, increment=8, samples=120, final=32)
    options = {"size": 32, "streams": 8, "warmup": warmup}
    alone = take(data, 12, **options)
    sizes = [batch.num_samples for batch in alone]
    assert [warmup.samples(number, 32) for number in range(13)] == np.cumsum([0, *sizes]).tolist()
    assert sizes == sorted(sizes) and set(sizes) == {8, 16, 24, 32} and sizes[-1] == 32
    assert [batch.position for batch in alone] == np.cumsum([0, *sizes[:-1]]).tolist()
    assert [batch.num_samples // 4 for batch in alone] == [len(batch.micro_batches) for batch in alone]
    assert all((batch.num_samples == 32) == (batch.position >= 120) for batch in alone)
    for parts, whole in zip(parts_of(data, 12, 2, **options), alone, strict=True):
        assert np.array_equal(together(parts), np.sort(whole.indices))
        assert sum(part.num_tokens for part in parts) == whole.num_tokens
    for number in (1, 3, 5):
        again = take(data, 12 - number, **options, start=alone[number].position)
        assert all(np.array_equal(a.indices, b.indices) for a, b in zip(alone[number:], again, strict=True))


def test_batches_of_several_sizes_are_the_same_for_any_ranks_and_from_any_step(data):
    """A size holds for the batches that begin before its end."""
    options = {"size": 8, "streams": 8, "warmup": BatchPhases((32, 16), (50, 81))}
    alone = take(data, 8, **options)
    assert [batch.num_samples for batch in alone] == [32, 32, 16, 16, 8, 8, 8, 8]
    assert [options["warmup"].samples(number, 8) for number in (0, 1, 3, 8)] == [0, 32, 80, 128]
    assert BatchPhases((32, 16), (50, 60)).samples(4, 8) == 32 + 32 + 8 + 8, "a phase that a batch went over"
    assert [len(batch.micro_batches) for batch in alone] == [8, 8, 4, 4, 2, 2, 2, 2]
    for parts, whole in zip(parts_of(data, 8, 2, **options), alone, strict=True):
        assert np.array_equal(together(parts), np.sort(whole.indices))
    for number in (1, 3, 5):
        again = take(data, 8 - number, **options, start=alone[number].position)
        assert all(np.array_equal(a.indices, b.indices) for a, b in zip(alone[number:], again, strict=True))
    with pytest.raises(UserError, match="found 6, expected a multiple of micro_batch_size 4"):
        take(data, 1, size=8, streams=2, warmup=BatchPhases((6,), (10,)))


def test_every_size_on_the_way_must_divide(data):
    with pytest.raises(UserError, match="found 14, expected a multiple of micro_batch_size 4"):
        take(data, 1, size=32, streams=2, warmup=growing_batches(initial=8, increment=6, samples=10, final=32))


def test_resuming_is_a_seek_across_epochs(data):
    samples = ShardReader(data).num_samples
    steps = 2 * samples // 24 + 3
    straight = take(data, steps)
    resumed = take(data, 4, start=24 * (steps - 4))
    for first, again in zip(straight[-4:], resumed, strict=True):
        assert (first.position, first.epoch) == (again.position, again.epoch)
        assert np.array_equal(first.indices, again.indices)
        for a, b in zip(first.micro_batches, again.micro_batches, strict=True):
            assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)
    assert straight[-1].epoch == 2


def test_a_micro_batch_is_what_the_shards_say(data):
    reader = ShardReader(data)
    (batch,) = take(data, 1)
    samples, masks = reader.take(batch.indices, 0)
    by_ids = {}
    for number, ids in enumerate(corpus.rows(samples)):
        low, high = masks.offsets[number], masks.offsets[number + 1]
        masked = list(ids)
        for position, replacement in zip(masks.positions[low:high], masks.ids[low:high], strict=True):
            masked[position] = int(replacement)
        by_ids[tuple(masked)] = (ids, masks.positions[low:high], number)
    for micro in batch.micro_batches:
        offsets = micro["sequence_offsets"].tolist()
        assert micro["max_sequence_length"] == max(np.diff(offsets))
        assert micro["labels"].dtype == torch.int64 and micro["sequence_offsets"].dtype == torch.int32
        place = 0
        for row, (low, high) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            ids, positions, number = by_ids[tuple(micro["input_ids"][low:high].tolist())]
            count = len(positions)
            assert (micro["masked_positions"][place : place + count] - low).tolist() == positions.tolist()
            assert micro["labels"][place : place + count].tolist() == [ids[p] for p in positions]
            assert micro["position_ids"][low:high].tolist() == list(range(high - low))
            start = int(samples.segment_b_start[number])
            assert micro["token_type_ids"][low:high].tolist() == [0] * start + [1] * (high - low - start)
            assert int(micro["next_sentence_label"][row]) == samples.next_sentence_label[number]
            place += count
        assert place == len(micro["labels"])


def dynamic(folder):
    """The same text with masks drawn at load time."""
    output = str(folder / "dynamic")
    prepare(corpus.config(folder, [folder / "in"], output=output, masking=MaskingConfig(mode="dynamic")))
    return folder / "dynamic"


def test_a_masking_rate_follows_the_position_for_any_ranks_and_from_any_batch(folder):
    data = dynamic(folder)
    changing = RateSchedule(0.5, 0.1, begin=24, end=24 * 6)
    whole = take(data, 8, rate=changing)
    for first, world_size in ((0, 2), (3, 3), (5, 1)):
        for number, parts in enumerate(parts_of(data, 8 - first, world_size, start=24 * first, rate=changing)):
            found = [s for part in parts for micro in part.micro_batches for s in sequences(micro)]
            expected = [s for micro in whole[first + number].micro_batches for s in sequences(micro)]
            assert sorted(found) == sorted(expected)
    shares = [batch.num_masked / batch.num_tokens for batch in whole]
    assert shares[0] == pytest.approx(0.5, abs=0.02) and shares[6:] == pytest.approx([0.1, 0.1], abs=0.02)
    assert all(before > after for before, after in zip(shares[1:5], shares[2:6], strict=True))


@pytest.mark.parametrize(("world_size", "max_samples"), [(1, None), (2, None), (3, 10), (5, 3)])
def test_evaluation_covers_every_sample_once_with_equal_steps(data, world_size, max_samples):
    reader = ShardReader(data, "validation")
    count = min(max_samples or reader.num_samples, reader.num_samples)
    found = []
    steps = math.ceil(count / (2 * world_size))
    for rank in range(world_size):
        found_batches = list(
            evaluation_batches(reader, micro_batch_size=2, rank=rank, world_size=world_size, max_samples=max_samples)
        )
        assert len(found_batches) == steps
        for batch in found_batches:
            filler = bool((batch["labels"] == -100).all())
            assert not filler or (batch["next_sentence_label"] == -100).all()
            found += [] if filler else sequences(batch)
    assert len(found) == count
    samples, masks = reader.take(np.arange(count), 0)
    assert sorted(map(len, found)) == sorted(samples.lengths.tolist())


def test_a_failure_in_the_thread_reaches_the_consumer(data, tmp_path):
    import shutil

    shutil.copytree(data, tmp_path / "data")
    for path in (tmp_path / "data" / "train").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        take(tmp_path / "data", 50)


def test_refusals(data):
    with pytest.raises(UserError, match="24.*multiple.*5.*1 = 5"):
        take(data, 1, micro=5)
    with pytest.raises(UserError, match="data_streams: found 16, expected a divisor of the global batch size 24"):
        take(data, 1, streams=16)
    with pytest.raises(UserError, match="rank: found 5 of 2 processes, expected 0 to 1"):
        take(data, 1, rank=5, world_size=2)
    for wrong in (dict(streams=0), dict(size=0), dict(micro=0), dict(world_size=0), dict(seed=-1), dict(start=-1)):
        ((name, value),) = wrong.items()
        name = {"size": "global_batch_size", "micro": "micro_batch_size", "start": "samples_consumed"}.get(name, name)
        with pytest.raises(UserError, match=f"^{name}: found {value}, expected a whole number, at least [01]$"):
            take(data, 1, **wrong)


def test_a_process_may_end_with_a_stream_that_is_open(data):
    """As where a loop ends with an exception: the thread that reads ends before the interpreter does."""
    script = f"""
import atexit
import threading
from pathlib import Path
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards import shard_file
from cloze.pipeline.shards.reader import ShardReader
shard_file.BLOCK_TOKENS = {shard_file.BLOCK_TOKENS}
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
stream = BatchStream(ShardReader(Path({str(data)!r})), global_batch_size=8, micro_batch_size=8,
                     rank=0, world_size=1, streams=2, seed=0)
next(stream)
print(any(thread.name.startswith("cloze-batches") for thread in threading.enumerate()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n['MainThread']\n"), done.stderr
