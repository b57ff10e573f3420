"""Files whose values were changed, with the right hashes, read in this process: manifests, tokenizers, states of
checkpoints, tables' metadata and JSON lines. A reading ends with a UserError of one line, or with what a simple
reference reader finds.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from cloze.launch.checkpoint.state import STATE, TrainState, damage, write_state
from cloze.launch.texts.tables import read_table
from cloze.pipeline import readers
from cloze.pipeline.config import InspectConfig, PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import inspect
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization.tokenizer import Tokenizer, copy_tokenizer
from tests.pipeline import corpus
from tests.synthetic import make_shards

VALUES = (
    *(None, True, False, -1, 0, 1, 7, 10**7, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "1", "x" * 5000, "\x00", "[MASK]", "../../x", [], {}, [1], ["x"], {"a": 1}, [[[]]]),
)
# What lines of JSON are made of, and what is wrong in them.
ATOMS = (
    *(
        '"text"',
        '"id"',
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        '"x y"',
        '"é\\n"',
        "1",
        "NaN",
        "null",
        "01",
        "\\",
        '"',
        " ",
        "\t",
    ),
    *('"\\ud83d\\ude00"', '"\\ud83d"', "\ufeff", '"text": "b"', '"te\\u0078t": "q"', "\u2028", "\x0b", "\x00", '"\\x"'),
)
# Of the last line of a message; a name of 5,000 letters is cut where it is printed (`exit_status`).
Reading = tuple[str, Callable[[], object]]


def changed(tree: object, rng: random.Random) -> tuple[object, str]:
    """A copy of JSON values of which one is removed, renamed, repeated or another; and what was done."""
    tree = json.loads(json.dumps(tree))
    node, path = tree, []
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append(key)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.75:
            node = node[key]
            continue
        how = rng.choice(("removed", "renamed", "value", "value", "value"))
        if how == "removed":
            del node[key]
        elif how == "renamed" and isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        else:
            node[key] = rng.choice(VALUES)
            how = f"{node[key]!r:.30}"
        return tree, f"{path} {how}"


class Readings:
    """Makes one reading after another in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored, self.dynamic = make_shards(folder / "stored"), make_shards(folder / "dynamic", mask_sets=0)
        corpus.tokenizer().save(folder / "tokenizer")

    def manifest(self, rng: random.Random) -> Reading:
        """Prepared data with a manifest that was changed, whose hash is right."""
        data = rng.choice((self.stored, self.dynamic))
        copy = self._copy(data)
        tree, what = changed(json.loads((copy / "manifest.json").read_text()), rng)
        tree["sha256"] = ""
        before, key, after = (json.dumps(tree, indent=1) + "\n").rpartition('"sha256": "')
        digest = hashlib.sha256(f"{before}{key}{after}".encode()).hexdigest()
        (copy / "manifest.json").write_text(f"{before}{key}{digest}{after}")

        def read() -> None:
            inspect(InspectConfig(str(copy)))
            reader = ShardReader(copy, "train")
            reader.take(np.arange(reader.num_samples), 0 if reader.manifest.mask_sets else None)

        return what, read

    def tokenizer(self, rng: random.Random) -> Reading:
        """A tokenizer that was changed, and its copy, which must be the same."""
        copy = self._copy(self.folder / "tokenizer")
        path = copy / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
        tree, what = changed(json.loads(path.read_text()), rng)
        path.write_text(json.dumps(tree))

        def read() -> None:
            tokenizer = Tokenizer.from_folder(copy)
            ids = tokenizer.encode("Kalo ren 1 é [MASK].")
            copy_tokenizer(tokenizer, copy / "copied")
            copied = Tokenizer.from_folder(copy / "copied")
            assert copied.fingerprint == tokenizer.fingerprint and copied.special_tokens == tokenizer.special_tokens
            assert copied.encode("Kalo ren 1 é [MASK].") == ids and len(copied.tokens) == copied.vocab_size

        return what, read

    def state(self, rng: random.Random) -> Reading:
        """A checkpoint whose state was changed: damaged, or fit to be computed with."""
        copy = self.folder / "step-00000003"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        whole = vars(TrainState(step=3, samples_consumed=48)) | {"world_size": 2, "zero_stage": 1, "metrics_lines": 3}
        state, what = changed(whole, rng)
        write_state(copy, {}, state)

        def read() -> None:
            if damage(copy) is not None:
                return
            found = json.loads((copy / STATE).read_text())
            made = TrainState(**{name: found[name] for name in vars(TrainState()) if name in found})
            assert made.step == 3 and found["world_size"] >= 1 and found["zero_stage"] in range(4)
            np.arange(0)[made.samples_consumed :], range(made.optimizer_steps), range(found.get("metrics_lines") or 0)

        return what, read

    def metadata(self, rng: random.Random) -> Reading:
        """A Parquet file whose metadata of `datasets` were changed: its labels, or their names."""
        named = {"_type": "ClassLabel", "names": ["x", "y"]}
        tree, what = changed({"info": {"features": {"label": named, "tags": {"_type": "List", "feature": named}}}}, rng)
        table = pa.table({"text": ["a", "b"], "label": [0, 1], "tags": [[1], []]})
        path = self.folder / "table.parquet"
        parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(tree)}), path)

        def read() -> None:
            found = [row.values["label"] for row in read_table(path).rows]
            try:
                feature = tree["info"]["features"]["label"]
                expected = feature["names"] if feature["_type"] == "ClassLabel" else [0, 1]
            except (KeyError, TypeError):  # a list there is one of values without names
                expected = [0, 1]
            assert found == expected, found

        return what, read

    def lines(self, rng: random.Random) -> Reading:
        """Lines of JSON, whole or not, against what Python's reader makes of them."""
        made = []
        for number in range(rng.randrange(1, 4)):
            line = json.dumps({"id": number, "text": rng.choice(("a", "é b", "w " * 300, ""))}, ensure_ascii=False)
            if rng.random() < 0.5:
                line = "".join(rng.choices(ATOMS, k=rng.randrange(1, 14)))
            place = rng.randrange(len(line))
            made.append(line[:place] + rng.choice(ATOMS) * (rng.random() < 0.4) + line[place + rng.randrange(2) :])
        text = "\n".join(made)
        path = self.folder / "lines.jsonl"
        path.write_text(text, encoding="utf-8", newline="")

        def read() -> None:
            expected = texts_of(text)
            source = SourceConfig(format="jsonl", id_field="id")
            try:
                _, tasks = readers.plan(PrepareConfig(input=[str(path)], source=source))
                found = [document for task in tasks for document in readers.read(task)]
            except UserError:
                assert expected is None or not text, f"refused, expected {expected}"
                raise
            assert [(bytes(each.text).decode(), each.id) for each in found] == expected

        return repr(text), read

    def _copy(self, folder: Path) -> Path:
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(folder, copy))


def texts_of(text: str) -> list[tuple[str, str | None]] | None:
    """The texts of lines of JSON and their ids; None if a line must be refused: a reader without bounds on memory."""
    found = []
    for line in text.removeprefix("\ufeff").split("\n"):
        if not line.strip(" \t\r\v\f"):
            continue
        try:
            pairs = json.loads(line, object_pairs_hook=lambda pairs: ("object", pairs))
            assert pairs[0] == "object"
            names = [name for name, _ in pairs[1]]
            assert names.count("text") == names.count("id") == 1
            record = json.loads(line)
            made = "" if record["text"] is None else record["text"]
            made.encode()
        except (ValueError, AssertionError, TypeError, AttributeError, IndexError, KeyError):
            return None
        found.append((made, None if record["id"] is None else str(record["id"])))
    return None if "\x00" in text else found


KINDS = ("manifest", "tokenizer", "state", "metadata", "lines")


def readings(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str | None]]:
    """So many readings; yields the kind, and what was wrong about one, None if nothing was."""
    rng, made = random.Random(seed), Readings(folder)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        what, read = getattr(made, kind)(rng)
        try:
            read()
        except UserError as error:
            yield kind, f"{what}: {error}" if "\n" in str(error) else None
        except BaseException as error:  # of pyo3 too
            if isinstance(error, KeyboardInterrupt):
                raise
            yield kind, f"{what}: a traceback, {error!r}"
        else:
            yield kind, None
