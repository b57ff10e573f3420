"""Batches: the same samples for any number of ranks, each once an epoch, from any position."""

import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch

from cloze.pipeline.config import MaskingConfig, SamplesConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.batches import BatchStream, BatchWarmup, SampleStream, deal, evaluation_batches
from cloze.pipeline.samples.masking import RateSchedule
from cloze.pipeline.shards.shards import ShardReader
from tests.pipeline import corpus
from tests.pipeline.plain_order import epoch_indices


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    corpus.write_jsonl(folder / "in" / "a.jsonl", corpus.documents(200))
    return folder


@pytest.fixture(scope="module")
def data(folder):
    prepare(corpus.config(folder, [folder / "in"]))
    return folder / "data"


def take(data, count, rank=0, world_size=1, size=24, micro=4, seed=1, start=0, tokens=0, warmup=None, rate=None):
    stream = BatchStream(ShardReader(data), global_batch_size=size, micro_batch_size=micro, rank=rank,
                         world_size=world_size, seed=seed, samples_consumed=start, tokens_consumed=tokens,
                         warmup=warmup, masking_rate=rate)
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def sequences(batch) -> list[tuple]:
    offsets = batch["sequence_offsets"].tolist()
    return [tuple(batch["input_ids"][a:b].tolist()) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def test_the_samples_of_an_epoch_are_all_samples(data):
    reader = ShardReader(data)
    count = -(-reader.num_samples // 24)
    indices = np.concatenate([batch.indices for batch in take(data, count)])
    assert np.array_equal(np.sort(indices[: reader.num_samples]), np.arange(reader.num_samples))


def test_the_order_is_a_function_of_block_sizes_seed_and_epoch(data):
    reader = ShardReader(data)
    count = 2 * reader.num_samples // 24
    indices = np.concatenate([batch.indices for batch in take(data, count, seed=5)])
    epochs = [epoch_indices(reader.block_sizes, reader.manifest.max_length, 5, epoch) for epoch in range(2)]
    assert np.array_equal(indices, np.concatenate(epochs)[: len(indices)])


def test_ranks_share_a_global_batch(data):
    alone = take(data, 5)
    for world_size in (2, 3):
        parts = [take(data, 5, rank, world_size) for rank in range(world_size)]
        for number, whole in enumerate(alone):
            together = [s for part in parts for micro in part[number].micro_batches for s in sequences(micro)]
            assert sorted(together) == sorted(s for micro in whole.micro_batches for s in sequences(micro))
            assert sum(part[number].num_tokens for part in parts) == whole.num_tokens
            assert sum(part[number].num_masked for part in parts) == whole.num_masked
            assert sum(part[number].num_pairs for part in parts) == whole.num_pairs == 24
            assert len(parts[0][number].micro_batches) == 24 // (4 * world_size)


def test_lengths_at_a_micro_step_are_alike_over_ranks():
    lengths = np.random.default_rng(0).integers(5, 100, 64)
    rows = [deal(lengths, 4, rank, 4) for rank in range(4)]
    for step in range(4):
        found = np.concatenate([lengths[rows[rank][step]] for rank in range(4)])
        assert found.max() <= np.sort(lengths)[16 * (step + 1) - 1] and found.min() >= np.sort(lengths)[16 * step]
    assert np.array_equal(np.sort(np.concatenate([np.concatenate(r) for r in rows])), np.arange(64))


def test_a_batch_that_grows_by_tokens_is_the_same_for_any_ranks_and_from_any_step(data):
    warmup = BatchWarmup(initial=8, increment=8, tokens=4000)
    alone = take(data, 12, size=32, warmup=warmup)
    sizes = [batch.num_samples for batch in alone]
    assert sizes == sorted(sizes) and set(sizes) == {8, 16, 24, 32} and sizes[-1] == 32
    assert [batch.num_samples // 4 for batch in alone] == [len(batch.micro_batches) for batch in alone]
    before = np.cumsum([0, *(batch.num_tokens for batch in alone)])
    assert all((size == 32) == (tokens >= 4000) for size, tokens in zip(sizes, before[:-1], strict=True))
    parts = [take(data, 12, rank, 2, size=32, warmup=warmup) for rank in range(2)]
    for number, whole in enumerate(alone):
        assert all(np.array_equal(part[number].indices, whole.indices) for part in parts)
        assert sum(part[number].num_tokens for part in parts) == whole.num_tokens == whole.global_tokens
    for number in (1, 3, 5):
        again = take(data, 12 - number, size=32, warmup=warmup, start=alone[number].position, tokens=before[number])
        assert all(np.array_equal(a.indices, b.indices) for a, b in zip(alone[number:], again, strict=True))


def test_every_size_on_the_way_must_divide(data):
    with pytest.raises(UserError, match="found 6, expected a multiple of micro_batch_size 4"):
        take(data, 1, size=32, warmup=BatchWarmup(initial=8, increment=6, tokens=10))


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


def test_epochs_take_the_mask_sets_in_turn(data):
    reader = ShardReader(data)
    stream = SampleStream(reader, seed=1)
    for epoch in range(4):
        (_, indices, _, masks), *_ = stream.read(epoch * reader.num_samples, 10)
        expected = reader.take(indices, mask_set=epoch % 3)[1]
        assert np.array_equal(masks.positions, expected.positions) and np.array_equal(masks.ids, expected.ids)


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


def test_dynamic_masks_differ_by_epoch_and_not_by_ranks(folder):
    prepare(
        corpus.config(folder, [folder / "in"], output=str(folder / "dynamic"), masking=MaskingConfig(mode="dynamic"))
    )
    data = folder / "dynamic"
    reader = ShardReader(data)
    assert reader.manifest.mask_sets == 0
    whole = take(data, 2)
    parts = [take(data, 2, rank, 2) for rank in range(2)]
    for number in range(2):
        together = [s for part in parts for micro in part[number].micro_batches for s in sequences(micro)]
        assert sorted(together) == sorted(s for micro in whole[number].micro_batches for s in sequences(micro))
    changing = RateSchedule(0.5, 0.1, begin=24, end=24 * 6)
    whole = take(data, 8, rate=changing)
    for first, world_size in ((0, 2), (3, 3), (5, 1)):  # as many ranks, from whatever batch on
        parts = [take(data, 8 - first, rank, world_size, start=24 * first, rate=changing) for rank in range(world_size)]
        for number in range(8 - first):
            together = [s for part in parts for micro in part[number].micro_batches for s in sequences(micro)]
            expected = [s for micro in whole[first + number].micro_batches for s in sequences(micro)]
            assert sorted(together) == sorted(expected)
    shares = [batch.num_masked / batch.num_tokens for batch in whole]
    assert shares[0] == pytest.approx(0.5, abs=0.02) and shares[7] == pytest.approx(0.1, abs=0.02)
    assert shares == sorted(shares, reverse=True) or shares[6] == pytest.approx(shares[7], abs=0.02)
    stream = SampleStream(reader, seed=1)
    seen = [{}, {}]
    for epoch in range(2):
        for _, indices, _, masks in stream.read(epoch * reader.num_samples, reader.num_samples):
            for n, index in enumerate(indices):
                seen[epoch][int(index)] = masks.positions[masks.offsets[n] : masks.offsets[n + 1]].tolist()
    assert seen[0].keys() == seen[1].keys()
    assert sum(seen[0][index] == seen[1][index] for index in seen[0]) < 0.2 * len(seen[0])


def test_epochs_cycle_through_pair_sets(folder):
    config = corpus.config(folder, [folder / "in"], output=str(folder / "pairs"), mask_sets=2,
                           samples=SamplesConfig(pair_sets=2))
    manifest = prepare(config)
    reader = ShardReader(config.output)
    first, second = reader.epoch_sizes
    assert first + second == reader.num_samples and {s.pair_set for s in manifest.splits["train"].shards} == {0, 1}
    stream = SampleStream(reader, seed=1)
    seen = []
    for start, size in ((0, first), (first, second), (first + second, first)):
        parts = stream.read(start, size)
        seen.append(np.sort(np.concatenate([part[1] for part in parts])))
    assert np.array_equal(seen[0], np.arange(first)) and np.array_equal(seen[2], seen[0])
    assert np.array_equal(seen[1], np.arange(first, first + second))


@pytest.mark.parametrize(("world_size", "max_samples"), [(1, None), (2, None), (3, 10), (5, 3)])
def test_evaluation_covers_every_sample_once_with_equal_steps(data, world_size, max_samples):
    reader = ShardReader(data, "validation")
    count = min(max_samples or reader.num_samples, reader.num_samples)
    found = []
    steps = math.ceil(count / (2 * world_size))
    for rank in range(world_size):
        batches = list(evaluation_batches(reader, micro_batch_size=2, rank=rank, world_size=world_size,
                                          max_samples=max_samples))
        assert len(batches) == steps
        for batch in batches:
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


def test_padding_and_fields(data):
    (batch,) = take(data, 1)
    padding = 0
    for micro in batch.micro_batches:
        lengths = np.diff(micro["sequence_offsets"])
        padding += int((lengths.max() - lengths).sum())
    assert batch.num_padding == padding
    assert {field.name for field in dataclasses.fields(batch)} >= {"num_tokens", "num_masked", "num_pairs"}


def test_the_keys_are_parameters_of_forward():
    bert = pytest.importorskip("cloze.model.bert")
    from cloze.pipeline.loading.collate import collate

    keys = {"input_ids", "token_type_ids", "position_ids", "sequence_offsets", "max_sequence_length",
            "masked_positions", "labels", "next_sentence_label"}
    assert keys <= set(inspect.signature(bert.BertForPreTraining.forward).parameters)
    assert all(key in collate.__doc__ for key in keys)
