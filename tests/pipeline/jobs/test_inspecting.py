"""What `inspect` shows and `verify` finds, through the commands that call them."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from cloze.launch.tools import data as data_commands
from cloze.pipeline.config import InspectConfig, MaskingConfig, SamplesConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import inspecting
from cloze.pipeline.jobs.inspecting import histogram, inspect
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus
from tests.pipeline.corpus import shown, without_hashes
from tests.terminal import terminal


def test_decoded_samples_are_the_shards(data):
    found = inspect(InspectConfig(str(data), samples=5, mask_set=1))
    reader = ShardReader(data)
    tokens = (data / "tokenizer/vocab.txt").read_text(encoding="utf-8").split("\n")
    assert len(found.samples) == 5 and found.samples[-1].index == reader.num_samples - 1
    for sample in found.samples:
        samples, masks = reader.take([sample.index], 1)
        assert [p.original or p.text for p in sample.pieces] == [tokens[i] for i in samples.input_ids]
        assert [n for n, p in enumerate(sample.pieces) if p.original is not None] == masks.positions.tolist()
        assert {p.kind for p in sample.pieces} <= {"plain", "special", "masked", "random", "kept"}
        assert sample.pieces[0].kind == "special" and sample.label in ("follows", "random")
        for piece in sample.pieces:
            assert (piece.kind == "masked") == (piece.text == "[MASK]")
            assert (piece.kind == "kept") == (piece.original == piece.text)


def test_data_without_samples_has_its_table(data):
    manifest = Manifest.load(data)
    for name, split in manifest.splits.items():
        manifest.splits[name] = replace(split, counts={}, shards=replace(split.shards, samples=[]))
    assert "0.00% of the tokens" in dict(inspecting.facts(manifest))["masked"]


def test_the_table_says_what_counts(data, tmp_path, monkeypatch):
    text = shown(data_commands.inspect, InspectConfig(str(data), tensorboard=str(tmp_path / "board")))
    assert re.search(r"train +│ .* shards, [\d.]+ kB", text) and "bytes a token" not in text, "of so few tokens"
    monkeypatch.setattr(inspecting, "BLOCK_TOKENS", 1)
    assert "bytes a token" in dict(inspect(InspectConfig(str(data))).facts)["train"], "of blocks that are full"
    assert re.search(r"tokens lost +│ 0 ", text) and re.search(r"documents +│ 400 ", text)
    shown(data_commands.inspect, InspectConfig(str(data), split="test", tensorboard=str(tmp_path / "empty")))
    assert "% mask" in text and "unigram entropy" in text and "█" in text and "sample 0" in text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert events.Tags()["histograms"] == ["data/train_lengths"]
    assert "data/samples/text_summary" in events.Tags()["tensors"]


def test_masks_drawn_at_load_time_are_shown_as_configured(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(30))
    prepare(corpus.config(tmp_path, [path], masking=MaskingConfig(mode="dynamic", rate=0.3, mask_share=0.7)))
    (row,) = [value for name, value in inspect(InspectConfig(str(tmp_path / "data"))).facts if name == "masked"]
    assert row == "at load time, 30% of the tokens (token), of which 70% mask, 10% random, 20% kept"


def test_stored_sets_of_hardly_any_masks_are_shown_as_stored(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(3))
    rare = MaskingConfig(selection="independent", rate=1e-9)
    prepare(corpus.config(tmp_path, [path], masking=rare))
    (row,) = [value for name, value in inspect(InspectConfig(str(tmp_path / "data"))).facts if name == "masked"]
    assert re.fullmatch(r"0.00% of the tokens \(token\), of these .*; \d+ mask sets", row)


def test_masks_are_seen_by_colour_on_a_terminal_and_as_plain_text_elsewhere(data, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    config = InspectConfig(str(data), samples=12)
    with terminal() as (stream, sent), redirect_stdout(stream):
        data_commands.inspect(config)
    text, plain = sent.decode(), shown(data_commands.inspect, config)
    pieces = [piece for sample in inspect(config).samples for piece in sample.pieces]
    for kind, codes in (("masked", "1;32"), ("random", "1;31"), ("kept", "1;33"), ("special", "2")):
        found = [
            piece.text if kind == "special" else f"{piece.text}{{{piece.original}}}"
            for piece in pieces
            if piece.kind == kind
        ]
        assert found and all(f"\x1b[{codes}m{each}\x1b[0m" in text and each in plain for each in found)
    assert "\x1b" not in plain


def test_histogram_counts_every_sample():
    lengths = [0] * 129
    lengths[1], lengths[128], lengths[64] = 3, 5, 7
    bars = histogram(lengths)
    assert sum(count for _, _, count in bars) == 15 and bars[0][:2] == (1, 8) and bars[-1] == (121, 128, 5)


def test_a_share_that_chance_cannot_explain_is_reported(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(300, sentences=(1, 1)))
    prepare(corpus.config(tmp_path, [path], samples=SamplesConfig(short_share=0.0)))
    assert "can only get a random B" in shown(data_commands.inspect, InspectConfig(str(tmp_path / "data"), samples=0))


@pytest.mark.parametrize("removed", [("sha256",), ("sha256", "more_lengths")])
def test_a_manifest_that_lost_its_hash_is_not_taken_for_an_old_one(data, removed):
    content = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    for name in removed:
        del content[name]
    (data / "manifest.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="manifest.json: found SHA-256 .*, expected None"):
        Manifest.load(data)


def test_a_manifest_of_before_is_read_with_a_note(data, capsys):
    (data / "manifest.json").write_text(json.dumps(without_hashes(data), indent=1) + "\n")
    shown(data_commands.inspect, InspectConfig(str(data)))
    assert "manifest.json: an earlier version wrote it without hashes" in capsys.readouterr().err
