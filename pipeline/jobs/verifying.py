"""`cloze verify`: hashes all files again, reads all blocks, and names the files that are damaged."""

from cloze.pipeline.config import VerifyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.progress import SILENT, Progress
from cloze.pipeline.shards.manifest import FILE_NAME, Manifest, ShardInfo
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.storage import readable_errors, sha256_of
from cloze.pipeline.stores.places import Place
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import check_readable


def verify(config: VerifyConfig, progress: Progress = SILENT) -> tuple[int, list[str]]:
    """Check a prepared folder with its additional lengths.

    Returns:
        The number of files checked and a line for each damage.
    """
    manifests, damaged = [Manifest.read(config.data)], []
    if fault := manifests[0].fault:  # nothing that it lists can be relied on
        return 1, [manifests[0].damage or fault]
    further = _further_folders(manifests[0])
    for folder in further:
        if not (folder / FILE_NAME).is_file():
            damaged.append(f"{folder}: found no {FILE_NAME}")
            continue
        try:
            manifest = Manifest.read(folder)
        except UserError as error:
            damaged.append(str(error))
            continue
        if manifest.fault:
            damaged.append(manifest.damage or manifest.fault)
        else:
            manifests.append(manifest)
    shards = [(m, shard) for m in manifests for split in m.splits.values() for shard in split.shards]
    progress.stage("verify", sum(shard.bytes for _, shard in shards), "bytes")
    for manifest, shard in shards:
        damaged += check_shard(manifest.folder / shard.file, shard)
        progress.advance(shard.bytes, 0, shard.tokens)
    for manifest in manifests:
        if manifest.remark:
            progress.note(manifest.remark)
        damaged += [*_check_manifest(manifest), *_check_tokenizer(manifest)]
    if not damaged:  # what has the right hashes may still have been made to harm
        for manifest in manifests:
            for split in manifest.splits:
                damaged += ShardReader(manifest.folder, split, check_sizes=False).faults()
    return len(shards) + 2 * (1 + len(further)), damaged


def _further_folders(manifest: Manifest) -> list[Place]:
    if manifest.more_lengths is None:
        names = sorted(path.name for path in manifest.folder.iterdir() if path.name.startswith("length-"))
        return [manifest.folder / name for name in names if (manifest.folder / name).is_dir()]
    return [manifest.folder / f"length-{length}" for length in manifest.more_lengths]


def check_shard(path: Place, shard: ShardInfo) -> list[str]:
    """A list with a line if a shard is damaged, else empty.

    Raises:
        UserError: it can't be read.
    """
    if not path.is_file():
        return [f"{path}: missing"]
    if (size := path.stat().st_size) != shard.bytes:
        return [f"{path}: found {size} bytes, expected {shard.bytes}"]
    return _check_hash(path, shard.sha256)


def _check_hash(path: Place, expected: str) -> list[str]:
    with readable_errors(path):
        digest = sha256_of(path)
    return [f"{path}: found SHA-256 {digest[:12]}…, expected {expected[:12]}…"] * (digest != expected)


def _check_manifest(manifest: Manifest) -> list[str]:
    """Check the manifest against its hash, and its redundant counts against each other."""
    path = manifest.folder / FILE_NAME
    if manifest.damage:
        return [manifest.damage]
    damaged = []
    if lost := tokens_lost(manifest):
        damaged.append(f"{path}: found {lost:,} tokens lost, expected none")
    return damaged


def _check_tokenizer(manifest: Manifest) -> list[str]:
    """Check the tokenizer's files against their hashes, and against each other and the manifest."""
    folder = manifest.tokenizer_folder
    try:
        hashes = manifest.tokenizer_hashes.items()
        if damaged := [line for name, expected in hashes for line in _check_hash(folder / name, expected)]:
            return damaged
        tokenizer = Tokenizer.from_folder(folder)
        if fault := tokenizer.fault_in(manifest):
            return [fault]
        with readable_errors(folder / "vocab.txt"):
            check_readable(folder / "vocab.txt")
            listed = (folder / "vocab.txt").read_bytes()
        if listed != tokenizer.vocab_txt().encode():
            return [f"{folder / 'vocab.txt'}: found other tokens than tokenizer.json has"]
    except UserError as error:
        return [str(error)]
    return []
