"""Files that are damaged, exchanged or made to harm, and the commands that must not be harmed or fooled by them.

The right answer to one is a line and status 2, or status 0 and the result of the undisturbed: what was harmed was not
needed, or was passed over.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from tests.forked import ForkedRun
from tests.launch.tiny_models import save_model
from tests.launching import pretrain_arguments, train, weights
from tests.pipeline import corpus
from tests.pipeline.shards.test_checks import CRAFTED, crafted
from tests.synthetic import make_shards

# A command that takes longer hangs, whatever else the machine does.
PATIENCE_SECONDS = 120
STEPS = 6
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "3")
VALUES = (None, -1, 0, 10**7, 1e308, "", "x" * 10_000, "\x00", [], {}, True, "NaN", [[[]]])
EXAMPLES = "examples.tsv"
BOMB = "\n".join(
    ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
)
LINES = (
    b"{oops}\n",
    b"[1]\n",
    b'{"text": 3}\n',
    b'{"body": "x"}\n',
    b'{"text": "\xff"}\n',
    b'{"text": "a"',
    b"\x00" * 99,
)


class Malice:
    """What runs a function where a pickle of it is read by more than tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@dataclass(frozen=True)
class Target:
    """What is attacked.

    pristine: a folder, of which each attack has a copy. chosen: globs of the files that are harmed. command: on a copy.
    result: what a command that ended with 0 has made; None where any will do. harms: the names of those that apply.
    """

    name: str
    pristine: Path
    chosen: tuple[str, ...]
    command: Callable[[Path], list[str]]
    result: Callable[[Path], object] | None
    harms: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a hostile file; lost: why it was not the right answer, None if it was."""

    target: str
    what: str
    status: int | None
    lost: str | None
    output: str


ANY = ("truncated", "emptied", "garbage", "removed", "folder", "dangling link")


def prepare_target(texts: Path) -> Target:
    """A corpus and its preparation; made in a folder. A file less would be another corpus: none is removed."""
    for number, (suffix, opener) in enumerate((("gz", gzip.open), ("xz", lzma.open), ("bz2", bz2.open))):
        records = [json.dumps({"text": text}) + "\n" for text in corpus.documents(30, seed=number)]
        (texts / "in").mkdir(parents=True, exist_ok=True)
        with opener(texts / "in" / f"{number}.jsonl.{suffix}", "wt") as file:
            file.writelines(records)
    (texts / "in" / "3.jsonl").write_text(json.dumps({"text": "A plain file. It has two sentences."}) + "\n")
    corpus.tokenizer().save(texts / "tokenizer")
    return Target(
        "corpus",
        texts,
        ("in/*.gz", "in/*.xz", "in/*.bz2"),
        _prepare,
        _shards,
        ("truncated", "emptied", "garbage", "dangling link", "flipped", "lines", "full disk"),
    )


def targets(folder: Path) -> list[Target]:
    """A run between two checkpoints, prepared data, a corpus, a configuration, a model; made below `folder`."""
    data = make_shards(folder / "data")
    run = folder / "runs" / "run"
    train(data, run, *RUN)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")  # as if it had died before
    texts = folder / "texts"
    recipe = folder / "recipe"
    recipe.mkdir()
    fields = {
        "train": {"max_steps": 4, "learning_rate": 1e-3},
        "model": {"hidden_size": 32, "num_hidden_layers": 2},
        "optimizer": {"betas": [0.9, 0.98]},
        "schedule": {"name": "linear"},
    }
    (recipe / "recipe.yaml").write_text(yaml.safe_dump(fields))
    model = save_model(folder / "models" / "model").parent
    examples = "".join(f"the cat {number}\t{'ab'[number % 2]}\n" for number in range(24))
    (model / EXAMPLES).write_text(f"text\tlabel\n{examples}")
    return [
        Target(
            "run",
            run.parent,
            ("run/checkpoints/**/*", "run/*.yaml", "run/*.json", "run/*.jsonl"),
            lambda copy: pretrain_arguments(data, copy / "run", *RUN),
            lambda copy: weights(copy / "run"),
            (*ANY, "flipped", "pickle", "full disk"),
        ),
        Target(
            "data",
            data,
            ("manifest.json", "train/*", "tokenizer/tokenizer.json"),
            lambda copy: pretrain_arguments(copy, copy.with_name(f"{copy.name}-run"), *RUN),
            lambda copy: weights(copy.with_name(f"{copy.name}-run")),
            (*ANY, "flipped", "signed", "crafted"),
        ),
        Target(
            "tokenizer",
            texts,
            ("tokenizer/*.json",),
            _prepare,
            None,
            (*ANY, "value"),
        ),
        prepare_target(texts),
        Target(
            "recipe",
            recipe,
            ("recipe.yaml",),
            lambda copy: [
                "pretrain",
                "--config",
                str(copy / "recipe.yaml"),
                "--data",
                str(data),
                "--output",
                str(copy / "run"),
                "--print_config",
            ],
            None,
            (*ANY, "flipped", "bomb", "value"),
        ),
        Target(
            "model",
            model,
            ("model/*",),
            lambda copy: ["predict", "embed", str(copy / "model"), "the cat"],
            None,
            (*ANY, "value", "pickle"),
        ),
        Target(
            "export",
            run.parent,
            (),
            lambda copy: ["export", str(copy / "run"), "--output", str(copy / "exported")],
            lambda copy: corpus.contents(copy / "exported"),
            ("full disk",),
        ),
        Target(
            "vocabulary",
            texts,
            (),
            lambda copy: [
                "vocab",
                "--input",
                str(copy / "in"),
                "--output",
                str(copy / "vocabulary"),
                "--vocab_size",
                "300",
                "--workers",
                "1",
            ],
            lambda copy: corpus.contents(copy / "vocabulary"),
            ("full disk",),
        ),
        Target(
            "finetuning",
            model,
            (),
            lambda copy: [
                *("finetune", "classification", "--model", str(copy / "model"), "--output", str(copy / "run")),
                *("--train", str(copy / EXAMPLES), "--validation", str(copy / EXAMPLES)),
                *("--text_columns", "text", "--label_columns", "label", "--epochs", "1", "--train.precision", "fp32"),
            ],
            lambda copy: {"weights": (copy / "run/model/model.safetensors").read_bytes()},
            ("full disk",),
        ),
        *(
            Target(
                f"vectors.{ending}",
                model,
                (),
                lambda copy, ending=ending: [
                    "predict",
                    "embed",
                    str(copy / "model"),
                    "the cat",
                    "--output",
                    str(copy / f"vectors.{ending}"),
                ],
                lambda copy, ending=ending: {"vectors": (copy / f"vectors.{ending}").read_bytes()},
                ("full disk",),
            )
            for ending in ("npy", "jsonl", "csv", "parquet")
        ),
    ]


def _prepare(copy: Path) -> list[str]:
    return [
        "prepare",
        "--input",
        str(copy / "in"),
        "--tokenizer",
        str(copy / "tokenizer"),
        "--output",
        str(copy / "out"),
        "--max_length",
        "64",
        "--mask_sets",
        "2",
        "--workers",
        "1",
    ]


def _shards(copy: Path) -> dict[str, bytes]:
    assert (copy / "out/manifest.json").is_file()
    return {str(path.relative_to(copy)): path.read_bytes() for path in sorted(copy.glob("out/*/*.arrow"))}


def harm(path: Path, kind: str, rng: random.Random, trap: Path) -> str:
    """Harm a file in a way; returns what was done."""
    content = path.read_bytes()
    if kind in ("removed", "folder", "dangling link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "dangling link":
            os.symlink("nowhere", path)
    elif kind == "flipped":
        place = rng.randrange(max(1, len(content)))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        return f"flipped a bit of byte {place} of {path.name}"
    elif kind == "value" and path.suffix in (".json", ".yaml"):
        value = rng.choice(VALUES)
        place, changed = _changed(yaml.safe_load(content), value, rng)
        path.write_text(json.dumps(changed))  # which is YAML too
        return f"{place} of {path.name} is {str(value)[:20]!r}"
    elif kind == "pickle":
        torch.save({"module": Malice(trap)}, path)
    else:
        path.write_bytes(
            {
                "truncated": lambda: content[: rng.randrange(max(1, len(content)))],
                "emptied": lambda: b"",
                "bomb": lambda: BOMB.encode(),
                "lines": lambda: rng.choice(LINES),
            }.get(kind, lambda: rng.randbytes(max(1, len(content))))()
        )
    return f"{kind}: {path.name}"


def sign(path: Path, rng: random.Random) -> str:
    """Change a value of a manifest, and its hash accordingly; returns what was done."""
    value = rng.choice(VALUES)
    place, changed = _changed(json.loads(path.read_text()), value, rng)
    text = json.dumps(changed | {"sha256": ""} if isinstance(changed, dict) else changed, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text.replace('"sha256": ""', f'"sha256": "{digest}"'))
    return f"{place} of {path.name}, with the right hash, is {str(value)[:20]!r}"


def _changed(tree, value, rng: random.Random) -> tuple[str, object]:
    """The tree with a value at a random place, and that place."""
    if not isinstance(tree, (dict, list)) or not tree:
        return "", value
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    place, changed = _changed(tree[key], value, rng) if rng.random() < 0.7 else ("", value)
    tree[key] = changed
    return f"{key}.{place}".rstrip("."), tree


def alike(left, right) -> bool:
    """Whether two results are the same, bit for bit."""
    if left.keys() != right.keys():
        return False
    return all(
        torch.equal(left[name], right[name]) if isinstance(left[name], torch.Tensor) else left[name] == right[name]
        for name in left
    )


def judge(status: int | None, output: str, same: Callable[[], bool]) -> str | None:
    """Why an end was not the right one; None if it was. same: whether a command that ended with 0 has made the result
    of the undisturbed."""
    if status is None:
        return f"still there after {PATIENCE_SECONDS} s"
    if "Traceback" in output:
        return "a traceback"
    if status == 0:
        return None if same() else "status 0 with another result than the undisturbed"
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if status != 2 or len(errors) != 1:
        return f"status {status} and {len(errors)} lines of errors, expected 2 and one"
    return None


def attack(target: Target, kind: str, copy: Path, expected: object, rng: random.Random) -> Outcome:
    """Harm a copy of the target and run its command."""
    shutil.copytree(target.pristine, copy, symlinks=True)
    files = sorted({path for glob in target.chosen for path in copy.glob(glob) if path.is_file()})
    trap = copy.with_name(f"{copy.name}-trap")
    if kind == "signed":
        what = sign(copy / "manifest.json", rng)
    elif kind == "crafted":
        what = rng.choice(list(CRAFTED))
        shutil.rmtree(copy)
        with pytest.MonkeyPatch.context() as patch:
            crafted(copy, patch, CRAFTED[what][0])
    else:
        what = harm(rng.choice(files), kind, rng, trap)
    process = ForkedRun(target.command(copy))
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(9)
        output, status = process.printed(), None
    lost = judge(status, output, lambda: target.result is None or alike(target.result(copy), expected))
    if trap.exists():
        lost = "what the pickle holds was run"
    return Outcome(target.name, what, status, lost, output)


def undisturbed(target: Target, copy: Path) -> object:
    """What the target's command makes of a copy of it."""
    shutil.copytree(target.pristine, copy)
    process = ForkedRun(target.command(copy))
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return target.result and target.result(copy)


def attacks(folder: Path, count: int, seed: int) -> Iterator[Outcome]:
    """So many hostile files, all targets and ways in turn; yields what came of each.

    Raises:
        AssertionError: an undisturbed command fails.
    """
    rng = random.Random(seed)
    expected: dict[str, object] = {}
    cases = [(target, kind) for target in targets(folder) for kind in target.harms if kind != "full disk"]
    rng.shuffle(cases)
    for number in range(count):
        target, kind = cases[number % len(cases)]
        if target.name not in expected:
            expected[target.name] = undisturbed(target, folder / f"{target.name}-whole")
        copy = folder / f"attacked-{number}"
        yield attack(target, kind, copy, expected[target.name], rng)
        for path in folder.glob(f"{copy.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
