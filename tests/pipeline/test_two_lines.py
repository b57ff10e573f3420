"""The two-line tutorial: its vocabulary and its tensors, exactly, from the shipped configuration."""

from pathlib import Path

import jsonargparse
import numpy as np
import pytest
import torch

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.loading.collate import collate, pad
from cloze.pipeline.records import Masks
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader

CONFIG = Path(__file__).resolve().parents[2] / "configs/prepare/two_lines.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_lines")
    (folder / "lines.txt").write_text("Welcome to the\tthe jungle\nI can stay\there all night\n")
    return folder


def config(folder, *arguments: str) -> PrepareConfig:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(PrepareConfig, None, sub_configs=True)
    parser.add_argument("--config", action="config")
    given = ["--config", str(CONFIG), f"--input=[{folder / 'lines.txt'}]", *arguments]
    namespace = parser.instantiate(parser.parse_args(given))
    fields = {name: getattr(namespace, name) for name in PrepareConfig.__dataclass_fields__}
    return PrepareConfig(**fields)


@pytest.fixture(scope="module")
def data(folder):
    train_vocabulary(config(folder, f"--output={folder / 'vocab'}"))
    prepare(config(folder, f"--output={folder / 'data'}", f"--tokenizer={folder / 'vocab'}"))
    return folder / "data"


def test_the_vocabulary(folder, data):
    expected = "<pad> <unk> <eos> <sos> <mask> the I Welcome all can here jungle night stay to"
    assert (data / "tokenizer/vocab.txt").read_text().split() == expected.split()


def test_the_tensors(data):
    reader = ShardReader(data)
    samples, _ = reader.take(np.arange(reader.num_samples), None)
    wanted = [3, 7, 14, 5, 2, 5, 11, 2]
    rows = [samples.input_ids[a:b].tolist() for a, b in zip(samples.offsets[:-1], samples.offsets[1:], strict=True)]
    number = rows.index(wanted)
    assert samples.next_sentence_label[number] == 0
    sample, _ = reader.take(np.array([number]), None)
    # token 1 masked, and `jungle` replaced by `here`
    batch = collate(sample, Masks(np.array([1, 6], np.uint16), np.array([4, 10]), np.array([0, 2])), (1, 2))
    padded = pad(batch, 20, ignore_index=0)
    assert padded["input_ids"].tolist() == [[3, 4, 14, 5, 2, 5, 10, 2] + [0] * 12]
    assert padded["labels"].tolist() == [[0, 7, 0, 0, 0, 0, 11, 0] + [0] * 12]
    assert padded["token_type_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2] + [0] * 12]
    assert padded["attention_mask"].tolist() == [[1] * 8 + [0] * 12]
    with pytest.raises(UserError, match="found 7, expected at least 8"):
        pad(batch, 7)


def test_an_empty_split_says_so(data):
    manifest = Manifest.load(data)
    assert all(manifest.splits[name].counts == {"samples": 0, "tokens": 0} for name in ("validation", "test"))


def test_pairs_and_masks_are_redrawn_at_each_visit(data):
    reader = ShardReader(data)
    assert reader.epoch_sizes == [2] * 100
    stream = BatchStream(reader, global_batch_size=2, streams=2, micro_batch_size=2, rank=0, world_size=1, seed=1)
    try:
        visits = [next(stream).micro_batches[0] for _ in range(150)]
    finally:
        stream.close()
    labels = torch.cat([visit["next_sentence_label"] for visit in visits])
    assert set(labels.tolist()) == {0, 1} and 0.3 < labels.float().mean() < 0.7
    masked = torch.tensor([len(visit["labels"]) for visit in visits]).float()
    assert abs(masked.mean() / 11 - 0.15) < 0.04 and (masked == 0).any()  # 11 words in the two lines
    assert len({tuple(visit["masked_positions"].tolist()) for visit in visits}) > 30
