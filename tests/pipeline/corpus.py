"""Text made on the spot: documents of sentences over a small vocabulary, the same for the same seed."""

import fnmatch
import gzip
import io
import json
import os
import random
from contextlib import redirect_stdout
from pathlib import Path

import pyarrow as pa

from cloze.pipeline.config import PrepareConfig, ShardsConfig, SplitConfig
from cloze.pipeline.records import BASE_COLUMNS, ROLES, mask_columns
from cloze.pipeline.shards import shard_file
from cloze.pipeline.storage import sha256_of
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer

NAMES = dict(zip(ROLES, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), strict=True))
SYLLABLES = ["ka", "lo", "mi", "ren", "tas", "u", "vor", "e", "shi", "dan", "po", "gly", "est", "ing"]


def words(count: int = 400, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return sorted({"".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(count)})


def documents(count: int, seed: int = 0, sentences: tuple[int, int] = (1, 30)) -> list[str]:
    """Documents with paragraphs, abbreviations, quotes and some accents."""
    rng = random.Random(seed)
    vocabulary = words()
    made = []
    for _ in range(count):
        text = []
        for _ in range(rng.randint(*sentences)):
            chosen = [vocabulary[int(rng.random() ** 2 * len(vocabulary))] for _ in range(rng.randint(3, 25))]
            chosen[0] = chosen[0].capitalize()
            if rng.random() < 0.1:
                chosen.insert(1, "Mr. Déné")
            text.append(" ".join(chosen) + rng.choice([".", ".", "!", "?", '."']))
            text.append("\n\n" if rng.random() < 0.2 else " ")
        made.append("".join(text).strip())
    return made


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": f"{path.stem}-{number}", "text": text}) + "\n")
    return path


def tokenizer(lowercase: bool = True, strip_accents: bool | None = None, extra: tuple[str, ...] = ()) -> Tokenizer:
    """A WordPiece tokenizer over syllables, letters and some words."""
    tokens = [*NAMES.values(), *(chr(code) for code in range(33, 127))]
    tokens += [f"##{chr(code)}" for code in range(97, 123)]
    tokens += SYLLABLES + [f"##{syllable}" for syllable in SYLLABLES] + words()[::3] + list(extra)
    listed = list(dict.fromkeys(tokens))
    backend = wordpiece_backend({token: n for n, token in enumerate(listed)}, NAMES, lowercase, strip_accents)
    return Tokenizer(backend, NAMES)


def config(folder: Path, inputs: list[Path], **changes) -> PrepareConfig:
    """A small run: many shards of few tokens."""
    saved = folder / "tokenizer"
    if not saved.is_dir():
        tokenizer().save(saved)
    values = {
        "input": [str(path) for path in inputs],
        "output": str(folder / "data"),
        "tokenizer": str(saved),
        "max_length": 64,
        "mask_sets": 3,
        "shards": ShardsConfig(target_tokens=8192),
        "split": SplitConfig(validation=0.1, test=0.05),
    }
    return PrepareConfig(**{**values, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name: what two equal runs must share."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def count(folder: Path, pattern: str = "*") -> int:
    """Number of files below a folder that may come and go meanwhile."""
    return len(fnmatch.filter((name for *_, names in os.walk(folder) for name in names), pattern))


def as_format_1(folder: Path) -> dict:
    """Turn a prepared folder's shards into those of format 1: blocks of 4,096 samples, no column `source`, no index.
    Returns the content of its manifest, which is left to write."""
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content["format_version"] = 1
    for split in content["splits"].values():
        listed = split["shards"]
        split["shards"] = [dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)]
        for shard in split["shards"]:
            path = folder / shard["file"]
            table = pa.ipc.open_file(path.read_bytes()).read_all().drop_columns("source").combine_chunks()
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                for batch in table.to_batches(max_chunksize=4096):
                    batch = pa.record_batch([pa.concat_arrays([column]) for column in batch.columns], batch.schema)
                    groups = {"base": BASE_COLUMNS[:-1]}
                    groups |= {str(number): mask_columns(number) for number in range(content["mask_sets"])}
                    writer.write_batch(
                        batch,
                        custom_metadata={
                            f"crc32.{name}": str(shard_file._checksum(map(batch.column, columns)))
                            for name, columns in groups.items()
                        },
                    )
            shard |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return content


def manifest_text(content: dict) -> str:
    """The text of a manifest."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def rows(samples) -> list[list[int]]:
    """Flat samples as lists of ids."""
    bounds = samples.offsets
    return [samples.input_ids[a:b].tolist() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def shown(function, config) -> str:
    """What a command prints."""
    stream = io.StringIO()
    with redirect_stdout(stream):
        function(config)
    return stream.getvalue()


def without_hashes(folder) -> dict:
    """The shards as an earlier version wrote them, and the content of its manifest."""
    content = as_format_1(folder)
    return {name: value for name, value in content.items() if name not in ("more_lengths", "tokenizer_files", "sha256")}
