"""`cloze verify`: hash everything again and name what is damaged."""

from pathlib import Path

from pipeline.config import VerifyConfig
from pipeline.errors import UserError
from pipeline.manifest import Manifest
from pipeline.progress import Progress, Silent
from pipeline.storage import readable_errors, sha256_of
from pipeline.tokenizer import Tokenizer


def verify(config: VerifyConfig, progress: Progress | None = None) -> tuple[int, list[str]]:
    """Check a prepared folder against its manifest: (files checked, a line for each that is damaged)."""
    progress = progress or Silent()
    manifest = Manifest.load(config.data)
    folder = Path(config.data)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    progress.stage("verify", sum(shard.bytes for shard in shards), "bytes")
    damaged = []
    for shard in shards:
        path = folder / shard.file
        if not path.is_file():
            damaged.append(f"{path}: missing")
        elif path.stat().st_size != shard.bytes:
            damaged.append(f"{path}: found {path.stat().st_size} bytes, expected {shard.bytes}")
        else:
            with readable_errors(path):
                digest = sha256_of(path)
            if digest != shard.sha256:
                damaged.append(f"{path}: found SHA-256 {digest[:12]}…, expected {shard.sha256[:12]}…")
        progress.advance(shard.bytes, 0, shard.tokens)
    try:
        fingerprint = Tokenizer.from_folder(folder / "tokenizer").fingerprint
        if fingerprint != manifest.tokenizer_fingerprint:
            damaged.append(f"{folder / 'tokenizer'}: found fingerprint {fingerprint[:12]}…, expected "
                           f"{manifest.tokenizer_fingerprint[:12]}…")  # fmt: skip
    except UserError as error:
        damaged.append(str(error))
    return len(shards) + 1, damaged
