"""The samples of one folder, epoch after epoch."""

import numpy as np
import pytest

from cloze.pipeline.config import SamplesConfig
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.streams import SampleStreams
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus
from tests.pipeline.loading.test_batches import dynamic, parts_of, sequences, take

pytestmark = pytest.mark.usefixtures("small_units")


def epoch_of(stream, epoch, size):
    """All samples of an epoch: indices, samples, masks."""
    portion = stream.read(range(1), epoch * size, size)
    return portion.indices, portion.samples, portion.masks


def test_epochs_take_the_mask_sets_in_turn(data):
    reader = ShardReader(data)
    stream = SampleStreams(reader, 1, seed=1)
    for epoch in range(4):
        indices, _, masks = epoch_of(stream, epoch, reader.num_samples)
        expected = reader.take(indices, mask_set=epoch % 3)[1]
        assert np.array_equal(masks.positions, expected.positions) and np.array_equal(masks.ids, expected.ids)


def test_dynamic_masks_differ_by_epoch_and_not_by_ranks(folder):
    data = dynamic(folder)
    reader = ShardReader(data)
    assert reader.manifest.mask_sets == 0
    whole = take(data, 2)
    for number, parts in enumerate(parts_of(data, 2, 2)):
        found = [s for part in parts for micro in part.micro_batches for s in sequences(micro)]
        assert sorted(found) == sorted(s for micro in whole[number].micro_batches for s in sequences(micro))
    stream = SampleStreams(reader, 1, seed=1)
    seen = []
    for epoch in range(2):
        indices, _, masks = epoch_of(stream, epoch, reader.num_samples)
        bounds = zip(masks.offsets[:-1], masks.offsets[1:], strict=True)
        seen.append({int(index): masks.positions[a:b].tolist() for index, (a, b) in zip(indices, bounds, strict=True)})
    assert seen[0].keys() == seen[1].keys()
    assert sum(seen[0][index] == seen[1][index] for index in seen[0]) < 0.2 * len(seen[0])


def test_epochs_cycle_through_pair_sets(folder):
    config = corpus.config(
        folder, [folder / "in"], output=str(folder / "pairs"), mask_sets=2, samples=SamplesConfig(pair_sets=2)
    )
    manifest = prepare(config)
    reader = ShardReader(config.output)
    first, second = reader.epoch_sizes
    assert first + second == reader.num_samples and {s.pair_set for s in manifest.splits["train"].shards} == {0, 1}
    stream = SampleStreams(reader, 1, seed=1)
    seen = []
    for start, size in ((0, first), (first, second), (first + second, first)):
        seen.append(np.sort(stream.read(range(1), start, size).indices))
    assert np.array_equal(seen[0], np.arange(first)) and np.array_equal(seen[2], seen[0])
    assert np.array_equal(seen[1], np.arange(first, first + second))
