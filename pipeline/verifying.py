"""`cloze verify`: hash everything again and name what is damaged."""

from pathlib import Path

from pipeline.config import VerifyConfig
from pipeline.errors import UserError
from pipeline.manifest import FILE_NAME, Manifest, ShardInfo
from pipeline.progress import Progress, Silent
from pipeline.storage import readable_errors, sha256_of
from pipeline.tokenizer import Tokenizer


def verify(config: VerifyConfig, progress: Progress | None = None) -> tuple[int, list[str]]:
    """Check a prepared folder, its further lengths included: (parts checked, a line for each that is damaged)."""
    progress = progress or Silent()
    further = sorted(path for path in Path(config.data).glob("length-*") if path.is_dir())
    manifests = [Manifest.load(folder) for folder in (Path(config.data), *further)]
    shards = [(m, shard) for m in manifests for split in m.splits.values() for shard in split.shards]
    progress.stage("verify", sum(shard.bytes for _, shard in shards), "bytes")
    damaged = []
    for manifest, shard in shards:
        damaged += check_shard(manifest.folder / shard.file, shard)
        progress.advance(shard.bytes, 0, shard.tokens)
    for manifest in manifests:
        damaged += [*_check_counts(manifest), *_check_tokenizer(manifest)]
    return len(shards) + 2 * len(manifests), damaged


def check_shard(path: Path, shard: ShardInfo) -> list[str]:
    """A line that says what is wrong with a shard, or none. Raises UserError if it can't be read."""
    if not path.is_file():
        return [f"{path}: missing"]
    if path.stat().st_size != shard.bytes:
        return [f"{path}: found {path.stat().st_size} bytes, expected {shard.bytes}"]
    with readable_errors(path):
        digest = sha256_of(path)
    return [f"{path}: found SHA-256 {digest[:12]}…, expected {shard.sha256[:12]}…"] * (digest != shard.sha256)


def _check_counts(manifest: Manifest) -> list[str]:
    """A manifest has no hash of itself, but it says most things twice."""
    damaged = []
    for name, split in manifest.splits.items():
        lengths = split.length_histogram
        for count, by_length, by_shard in (
            ("samples", sum(lengths), sum(shard.samples for shard in split.shards)),
            ("tokens", sum(n * times for n, times in enumerate(lengths)), sum(shard.tokens for shard in split.shards)),
        ):
            if not split.counts.get(count, 0) == by_length == by_shard:
                damaged.append(
                    f"{manifest.folder / FILE_NAME}: {name}: found {split.counts.get(count, 0)} {count}, "
                    f"{by_length} by length and {by_shard} in the shards, expected the same"
                )
    return damaged


def _check_tokenizer(manifest: Manifest) -> list[str]:
    """The fingerprint is that of tokenizer.json; the other two files must agree with it."""
    folder = manifest.folder / "tokenizer"
    try:
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            return [
                f"{folder}: found fingerprint {tokenizer.fingerprint[:12]}…, expected "
                f"{manifest.tokenizer_fingerprint[:12]}…"
            ]
        with readable_errors(folder / "vocab.txt"):
            listed = (folder / "vocab.txt").read_bytes()
        if listed != tokenizer.vocab_txt().encode():
            return [f"{folder / 'vocab.txt'}: found other tokens than tokenizer.json has"]
    except UserError as error:
        return [str(error)]
    return []
