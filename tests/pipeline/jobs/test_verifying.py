"""What `verify` finds in a prepared folder, and what it says of each damage."""

import hashlib
import json
import os
import re
import shutil

import pytest

from cloze.launch.pretrain.data import check_manifest
from cloze.launch.tools import data as data_commands
from cloze.model.config import BertConfig
from cloze.pipeline.config import InspectConfig, VerifyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import inspect
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.verifying import verify
from cloze.pipeline.shards.manifest import Manifest
from tests.pipeline import corpus
from tests.pipeline.corpus import shown, without_hashes


def test_verify_names_every_damage(data):
    count, damaged = verify(VerifyConfig(str(data)))
    assert damaged == [] and count > 3
    assert "all as they were written" in shown(data_commands.verify, VerifyConfig(str(data)))
    shards = Manifest.load(data).splits["train"].shards
    flipped, short, missing = (data / shard.file for shard in shards[:3])
    content = bytearray(flipped.read_bytes())
    content[-100] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:-1])
    missing.unlink()
    vocabulary = data / "tokenizer/tokenizer.json"
    vocabulary.write_text(vocabulary.read_text(encoding="utf-8").replace('"[PAD]"', '"[pad]"'), encoding="utf-8")
    _, damaged = verify(VerifyConfig(str(data)))
    assert len(damaged) == 4
    for path, line in zip((flipped, short, missing, data / "tokenizer"), damaged, strict=True):
        assert str(path) in line
    with pytest.raises(UserError, match="found 4 of"):
        shown(data_commands.verify, VerifyConfig(str(data)))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tokenizer/vocab.txt", "ka\n", "ak\n"),
        ("tokenizer/tokenizer_config.json", "{", "["),
        ("tokenizer/tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false'),
        ("tokenizer/tokenizer.json", '"type_id": 1', '"type_id": 0'),
        ("manifest.json", '\n    "samples": ', '\n    "samples": 1'),
        ("manifest.json", '"seed": 42', '"seed": 43'),
        ("manifest.json", '"pad": 0', '"pad": 1'),
        ("manifest.json", '"unigram_entropy": ', '"unigram_entropy": 1'),
        ("manifest.json", '"tokens_borrowed": ', '"tokens_borrowed": 1'),
        ("manifest.json", '"objective": "next_sentence"', '"objective": "given_pairs"'),
        ("manifest.json", '\n "sha256": "', '\n "sha256": "0'),
        ("manifest.json", '\n "seed"', '\n "seed": 1, "seed"'),
        ("manifest.json", ' "', '  "'),
    ],
)
def test_verify_names_damage_beside_the_shards(data, name, old, new):
    content = (data / name).read_text(encoding="utf-8")
    assert old in content
    (data / name).write_text(content.replace(old, new, 1), encoding="utf-8")
    _, damaged = verify(VerifyConfig(str(data)))
    assert damaged and f"{name}: found SHA-256" in damaged[0]
    if name == "manifest.json":
        with pytest.raises(UserError, match="manifest.json: found SHA-256 .*: it was changed after it was written"):
            Manifest.load(data)


@pytest.mark.parametrize("name", ["tokenizer/vocab.txt", "tokenizer/tokenizer_config.json"])
def test_verify_does_not_wait_for_a_pipe(data, name):
    (data / name).unlink()
    os.mkfifo(data / name)
    assert verify(VerifyConfig(str(data)))[1] == [f"{data / name}: found no regular file, expected one; remove it"]


def with_right_hash(data, place: tuple, value) -> None:
    """Change a value of a manifest, and its hash accordingly."""
    content = json.loads(Manifest.load(data).to_json())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    if value is ...:
        del inner[place[-1]]
    text = json.dumps(content | {"sha256": ""}, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    (data / "manifest.json").write_text(text.replace('"sha256": ""', f'"sha256": "{digest}"'), encoding="utf-8")


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (("vocab_size",), 1, r"tokenizer: found a tokenizer of size (\d+), expected \d+, as the manifest says"),
        (("vocab_size",), 50_000, r"tokenizer: found a tokenizer of size (\d+), expected \d+, as the manifest says"),
        (("special_tokens", "mask"), 3, "tokenizer: found special tokens .*mask=4.*, expected .*mask=7"),
    ],
)
def test_a_manifest_that_disagrees_with_its_tokenizer_is_a_line(data, place, change, message):
    """Ids above the tokenizer's have no names."""
    found = json.loads((data / "manifest.json").read_text())
    for name in place:
        found = found[name]
    with_right_hash(data, place, found + change)
    (line,) = verify(VerifyConfig(str(data)))[1]
    assert re.search(message, line)
    with pytest.raises(UserError, match=message):
        inspect(InspectConfig(str(data)))
    with pytest.raises(UserError, match=message):
        check_manifest(Manifest.load(data), BertConfig.preset("tiny"), None)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("mask_sets",), 10_000_000, "found mask_sets 10000000, expected a number up to 1000"),
        (("pair_sets",), 10**12, "found pair_sets"),
        (("vocab_size",), 10**12, "found vocab_size"),
        (("max_length",), -1, "found max_length"),
        (("counts", "documents"), "many", "counts: found a value"),
        (("counts",), None, "damaged \\(AttributeError"),
        (("preparation",), [], "damaged \\(TypeError"),
        (("unigram_entropy",), None, "found unigram_entropy None"),
        (("unigram_entropy",), 10**310, "found unigram_entropy 1000"),
        (("preparation", "samples", "random_share"), 1.5, "found shares \\[1.5, .*, expected numbers from 0 to 1"),
        (("preparation", "samples", "random_share"), 10**300, "found shares"),
        (("special_tokens", "pad"), 10**9, "found special_tokens"),
        (("tokenizer_fingerprint",), 7, "found a fingerprint, an objective or a seed of another kind"),
        (("preparation", "masking", "strategy"), "all", "masking: found strategy 'all', expected token or whole_word"),
        (("preparation", "masking", "rate"), 5, "found shares .*5, .*, expected numbers from 0 to 1"),
        (("preparation", "masking", "rate"), 0, "masking: masking.rate: found 0, expected above 0"),
        (("preparation", "masking", "span_p"), "x", "masking: found span_p 'x', expected float"),
        (("preparation", "masking", "max_predictions_per_sequence"), 10**29, "masking.*max_predictions_per_sequence"),
        (("sources", 0, "bytes"), None, "sources: found one of other values"),
        (("more_lengths",), ["../.."], "found more_lengths"),
        (("tokenizer_files",), {"/dev/zero": "x"}, "tokenizer_files: found another entry"),  # read without an end
        (("tokenizer_files",), {"..": "x"}, "tokenizer_files: found another entry"),
        (("tokenizer_files",), {"vocab.txt": None}, "tokenizer_files: found another entry"),
        (("tokenizer_files",), ["vocab.txt"], "damaged \\(AttributeError"),
        (("splits", "train", "length_histogram"), [1] * 100_000, "train: found a length_histogram"),
        (
            ("splits", "train", "length_histogram"),
            [1],
            "found .* samples in counts, .* and 1 in length_hist",
        ),
        (
            ("splits", "train", "length_histogram"),
            [0] * 20,
            "found .* samples in counts, .* and 0 in length_hist",
        ),
        (("splits", "train", "counts", "tokens"), 0, "train: found 0 tokens in counts"),
        (("splits", "train", "counts", "tokens"), 1 << 60, "train: found 1152921504606846976 tokens in counts"),
        (("splits", "validation", "counts"), {"masked": 5}, "validation: found"),
        (("splits", "train", "counts", "masked"), 5, "train: found 5 masked tokens of .* by how they"),
        (("splits", "train", "counts", "masked_kept"), 10**9, "train: found .* masked tokens of .* by how they"),
        (("objective",), "zzz", "found the objective 'zzz', expected one of next_sentence, "),
        (("splits", "test"), ..., "found no split 'test', expected train, validation, test"),
        (("splits", "train", "shards", "samples", 0), 10**18, "found 1000000000000000000 samples"),
        (("splits", "train", "shards", "tokens", 0), 10**17, "found .* samples of 100000000000000000 tokens"),
        (("splits", "train", "shards", "tokens", 0), -1, "shards: found a count"),
        (("splits", "train", "shards", "bytes", 0), 10**40, "shards: found a count"),
        (("splits", "train", "shards", "pair_set", 0), 10**9, "shards: found a pair_set"),
        (("splits", "train", "shards", "file", 0), "train/a\0b", "found shard 'train/a"),
        (("splits", "train", "shards", "file", 0), "train/\ud800", "found shard 'train/"),
        (("splits", "train", "shards", "file", 0), "../../x", "found shard '../../x', expected a file below"),
        (("splits", "train", "shards", "samples"), [1], "no columns of one length"),
        (("splits", "test", "shards", "tokens"), {}, "no columns of one length"),
        (("splits", "test", "shards", "pair_set"), "", "no columns of one length"),
    ],
)
def test_a_manifest_with_the_right_hash_and_hostile_numbers_is_a_line(data, place, value, message):
    """Tables and loops are as large as it says: ten million mask sets had no end."""
    with_right_hash(data, place, value)
    assert re.search(message, verify(VerifyConfig(str(data)))[1][0])
    with pytest.raises(UserError, match=f"manifest.json: .*{message}"):  # as inspect and pretrain read it
        Manifest.load(data)


@pytest.mark.parametrize("more", [1, -1])
def test_counts_that_are_not_those_of_the_shards_are_lines(data, more):
    """The tokens of a shard, lengths, and masked tokens, with every hash right and all of the manifest consistent."""
    content = json.loads(Manifest.load(data).to_json())
    train, table = content["splits"]["train"], content["splits"]["train"]["shards"]
    lengths = train["length_histogram"]
    masked = train["counts"] | {name: train["counts"][name] + more for name in ("masked", "masked_kept")}
    with_right_hash(data, ("splits", "train", "counts"), masked)
    (line,) = verify(VerifyConfig(str(data)))[1]
    assert re.search(
        rf"manifest.json: train: found {masked['masked']} masked tokens in counts, expected .*, as in", line
    )
    with_right_hash(data, ("splits", "train", "counts"), train["counts"])
    used = [length for length, count in enumerate(lengths) if count and lengths[length + more : length + more + 1]][3]
    moved = lengths.copy()
    moved[used] -= 1
    moved[used + more] += 1
    other = next(each for each in range(len(lengths)) if lengths[each] and each not in (used, used + more))
    balanced = moved.copy()  # as many tokens as before
    balanced[other] -= 1
    balanced[other - more] += 1
    with_right_hash(data, ("splits", "train", "length_histogram"), balanced)
    assert verify(VerifyConfig(str(data)))[1] == [
        f"{data / 'manifest.json'}: train: found a length_histogram of other lengths than its shards have"
    ]
    changed = train | {
        "length_histogram": moved,
        "counts": train["counts"] | {"tokens": train["counts"]["tokens"] + more},
        "shards": table | {"tokens": [table["tokens"][0] + more, *table["tokens"][1:]]},
    }
    with_right_hash(data, ("splits", "train"), changed)
    assert [line.split(": ", 1)[1] for line in verify(VerifyConfig(str(data)))[1]] == [
        f"found {table['tokens'][0]:,} tokens, expected {table['tokens'][0] + more:,}"
    ]


def test_verify_checks_a_manifest_without_hashes_as_well_as_it_can(data, capsys):
    content = without_hashes(data)

    def verified(changes: dict) -> list[str]:
        text = json.dumps(content | changes, indent=1, ensure_ascii=False) + "\n"
        (data / "manifest.json").write_text(text, encoding="utf-8")
        assert Manifest.read(data).to_json() == text  # so that its hash stays what it was
        with data_commands.Bars() as bars:
            return verify(VerifyConfig(str(data)), bars)[1]

    assert verified({}) == [] and "without hashes" in capsys.readouterr().err
    special = content["special_tokens"]
    assert "expected SpecialTokens" in verified({"special_tokens": special | {"pad": 1}})[0]
    assert "1 tokens lost" in verified({"counts": content["counts"] | {"tokens": content["counts"]["tokens"] + 1}})[0]
    train = content["splits"]["train"]
    train["counts"]["samples"] += 1
    assert re.search("found .* samples in counts", verified({"splits": content["splits"]})[0])


def test_verify_looks_into_further_lengths(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(100))
    prepare(corpus.config(tmp_path, [path], more_lengths=[128]))
    shard = tmp_path / "data/length-128/train/shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-8])
    _, damaged = verify(VerifyConfig(str(tmp_path / "data")))
    assert len(damaged) == 1 and str(shard) in damaged[0]
    assert verify(VerifyConfig(str(tmp_path / "data/length-128")))[1] == damaged
    shutil.rmtree(tmp_path / "data/length-128")
    _, damaged = verify(VerifyConfig(str(tmp_path / "data")))
    assert len(damaged) == 1 and "length-128: found no manifest.json" in damaged[0]
