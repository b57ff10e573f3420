"""`cloze prepare`: text to shards, in two stages, restartable at any moment.

Stage 1 tokenizes the input and scatters documents by the hash of their text (tokenizing.py); stage 2 builds a shard
from each range of hashes (building.py). Tasks depend on the input and the configuration alone, write aside and rename,
and leave a report when they are complete; so that running again does what is left, and the bytes are the same for
any number of workers. The manifest is written last.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.build_stage import BuildTask, ShardReport, build
from cloze.pipeline.jobs.estimating import check_disk, estimate
from cloze.pipeline.jobs.executors import open_executor, run_tasks
from cloze.pipeline.jobs.planning import plan_shards, plan_splits
from cloze.pipeline.jobs.tokenize_stage import Report, TokenizeTask, splitter_of, tokenize
from cloze.pipeline.progress import Progress, Silent
from cloze.pipeline.readers import plan
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.samples.masking import check_words
from cloze.pipeline.shards.manifest import FILE_NAME, SPLITS, Manifest, ShardTable, SplitInfo, entropy
from cloze.pipeline.storage import alone, publish_text, readable_errors, sha256_of
from cloze.pipeline.tokenization.tokenizer import FILES, Tokenizer, copy_tokenizer

# Of words, sentences, samples and masks. Raised when other ids or masks come of the same input: an interrupted run must
# not be finished by other rules than it was begun with.
_RULES = 3
WORK_FOLDER = ".work"  # holds stage 1 and the reports; removed when the manifest is published
TOKENIZER_FOLDER = "tokenizer"


def prepare(config: PrepareConfig, progress: Progress | None = None) -> Manifest:
    """Prepare a corpus into `config.output` and return its manifest (that of `max_length`, if there are several).

    Continues an interrupted run of the same command; returns at once if it is complete.
    Raises UserError if the folder holds another run, and for whatever else a user can mend.
    """
    progress = progress or Silent()
    _check(config)
    output = Path(config.output)
    tokenizer = Tokenizer.from_folder(config.tokenizer)
    check_words(config.masking.strategy, tokenizer)
    files, segments = plan(config)
    identity = _identity(config, tokenizer, files, segments)
    work = output / WORK_FOLDER
    if (complete := _complete(config, identity, files, output)) is not None:
        progress.note(f"{output} is complete already")
        _remove_work(work, progress)  # a kill between publishing and cleaning leaves it
        return complete
    _open_work(output, work, identity)
    with alone(output, work / "lock"):
        _run(config, tokenizer, files, segments, work, progress)
    _remove_work(work, progress)
    return Manifest.load(output)


def _remove_work(work: Path, progress: Progress) -> None:
    """Complete is complete: on a cluster tasks of a command that was killed may outlive it and write there still."""
    shutil.rmtree(work, ignore_errors=True)
    if work.exists():
        progress.note(f"{work} could not be removed; nothing needs it any more: remove it, or run this command again")


def _run(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    files: list[InputFile],
    segments: list[list[Segment]],
    work: Path,
    progress: Progress,
) -> None:
    """Both stages, and the manifests."""
    if tokenizer.word_table_reason:
        progress.note(f"the word table is off ({tokenizer.word_table_reason}): tokenizing goes at the library's rate")
    with open_executor(config) as executor:  # its processes start while this one estimates
        if (expected := estimate(config, tokenizer, files, segments)) is not None:
            check_disk(expected, work.parent)
            progress.note(f"estimate: {expected}")
        copy_tokenizer(tokenizer, Path(config.output) / TOKENIZER_FOLDER)  # workers read this one
        report = _tokenize(config, tokenizer, executor, segments, work, progress)
        hashes = _hash_sources(executor, files, progress)
        splits, remarks = plan_splits(config, report, work)
        for remark in remarks:
            progress.note(remark)
        built = _build(config, tokenizer, executor, report, splits, work, progress)
        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(executor.shutdown)  # its processes end while this one publishes
            manifests = [
                _publish(config, tokenizer, files, hashes, report, built[length], length) for length in config.lengths
            ]
            for manifest in manifests[::-1]:  # that of the output folder itself last: it says that all is there
                manifest.save(manifest.folder)


def length_folder(config: PrepareConfig, length: int) -> Path:
    """Where the shards of a length lie: OUTPUT, or OUTPUT/length-N for the further ones."""
    return Path(config.output) if length == config.max_length else Path(config.output) / f"length-{length}"


def _check(config: PrepareConfig) -> None:
    if not config.output:
        raise UserError("output: found none, expected a folder to write; name one with --output")
    if not config.tokenizer:
        raise UserError(
            "tokenizer: found none, expected a folder that `cloze vocab` wrote, a tokenizer.json or a vocab.txt; "
            "name one with --tokenizer"
        )


def _identity(
    config: PrepareConfig, tokenizer: Tokenizer, files: list[InputFile], segments: list[list[Segment]]
) -> dict:
    """What a run is: all that its bytes and its tasks depend on. JSON, so that it compares after a round trip."""
    tasks = json.dumps([[[part.file.number, part.start, part.stop] for part in task] for task in segments])
    preparation = config.preparation(config.max_length)
    return json.loads(
        json.dumps(
            {
                "preparation": preparation,
                "lengths": config.lengths,
                "tokenizer_fingerprint": tokenizer.fingerprint,
                "sources": [[file.source, file.name, file.size] for file in files],
                "times of change": [file.changed for file in files],
                "rules": _RULES,
                "library versions": {each.__name__: each.__version__ for each in (np, pa, tokenizers)},
                "division of the input": hashlib.sha256(tasks.encode()).hexdigest(),  # other versions may differ
            }
        )
    )


def _complete(config: PrepareConfig, identity: dict, files: list[InputFile], output: Path) -> Manifest | None:
    """The manifest of a complete run of the same command; UserError if it was another command's."""
    if not (output / FILE_NAME).is_file():
        return None
    manifest = Manifest.load(output)
    found = {
        "preparation": manifest.preparation,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "sources": [[source["source"], source["name"], source["bytes"]] for source in manifest.sources],
    }
    different = [name for name, value in found.items() if value != identity[name]]
    if different:
        raise UserError(
            f"output: {output} holds data prepared with another {_difference(found, identity, different[0])}; choose "
            "another --output or remove the folder"
        )
    published = (output / FILE_NAME).stat().st_mtime_ns
    for file, source in zip(files, manifest.sources, strict=True):
        if source["sha256"] and _touched(file) >= published and _hash_source(file) != source["sha256"]:
            raise UserError(
                f"output: {output} holds data prepared from other content of {file.path}, which has changed since; "
                "choose another --output or remove the folder"
            )
    missing = [length for length in config.lengths if not (length_folder(config, length) / FILE_NAME).is_file()]
    if missing:
        raise UserError(f"output: {output} is complete, but not with more_lengths {missing}; choose another --output")
    return manifest


def _touched(file: InputFile) -> int:
    """When a file, or the link that names it, was last written, replaced or renamed, nanoseconds. Copies may keep the
    times of their originals, which are older than the data; the system's own time of change is not theirs to keep."""
    with readable_errors(Path(file.path)):
        return max(file.changed, os.stat(file.path).st_ctime_ns, os.lstat(file.path).st_ctime_ns)


def _difference(found: dict, expected: dict, name: str) -> str:
    """The first difference of two identities, by name, with both values if they are short."""
    if isinstance(found.get(name), dict):
        for key in expected[name]:
            if found[name].get(key) != expected[name][key]:
                return f"{name}." + _difference(found[name], expected[name], key)
    values = f" ({found.get(name)!r}, now {expected[name]!r})"
    return name + (values if len(values) < 160 else "")


def _open_work(output: Path, work: Path, identity: dict) -> None:
    with readable_errors(output):
        if not work.is_dir() and output.is_dir() and any(output.iterdir()):
            raise UserError(
                f"output: {output} holds other files, expected a new or empty folder; choose another --output"
            )
        work.mkdir(parents=True, exist_ok=True)
        identity_file = work / "run.json"
        if identity_file.is_file():
            found = json.loads(identity_file.read_text(encoding="utf-8"))
            if found != identity:
                different = next(name for name in identity if found.get(name) != identity[name])
                what = _difference(found, identity, different)
                raise UserError(
                    f"output: {output} holds an interrupted run with another {what}; "
                    "repeat that command, choose another --output, or remove the folder"
                )
        else:
            publish_text(identity_file, json.dumps(identity))


def _tokenize(
    config: PrepareConfig, tokenizer: Tokenizer, executor: Executor, segments, work: Path, progress: Progress
) -> Report:
    tasks = [
        TokenizeTask(
            number=number,
            segments=task,
            splitter=splitter_of(task[0].file, config),
            tokenizer=str((Path(config.output) / TOKENIZER_FOLDER).resolve()),
            fingerprint=tokenizer.fingerprint,
            folder=str(work.resolve()),
            weights=[source.weight for source in config.all_sources],
        )
        for number, task in enumerate(segments)
    ]
    weights = [sum(segment.weight for segment in task.segments) for task in tasks]
    progress.stage("tokenize", sum(weights), "bytes")
    reports: list[Report | None] = [None] * len(tasks)

    def on_result(place: int, result: Report) -> None:
        reports[place] = result
        counts = result.counts
        progress.advance(weights[place], counts.get("documents_read", 0), counts.get("tokens", 0))

    run_tasks(executor, tokenize, tasks, weights, on_result)
    whole = Report()
    for report in reports:
        whole.add(**report.counts)
        whole.documents += report.documents
        whole.tokens += report.tokens
        whole.parts += report.parts
    return whole


def _hash_sources(executor: Executor, files: list[InputFile], progress: Progress) -> list[str | None]:
    hashes: list[str | None] = [None] * len(files)
    tasks = [file for file in files if file.format != "dataset" or file.parts]
    if tasks:
        progress.stage("hash", sum(file.size for file in tasks), "bytes")

    def on_result(place: int, digest: str) -> None:
        hashes[tasks[place].number] = digest
        progress.advance(tasks[place].size, 0, 0)

    run_tasks(executor, _hash_source, tasks, [file.size for file in tasks], on_result)
    return hashes


def _hash_source(file: InputFile) -> str:
    """SHA-256 of an input. Raises UserError if it isn't any more what was read."""
    paths = file.parts or (file.path,)
    with readable_errors(Path(file.path)):
        digest, statuses = sha256_of(*paths), [os.stat(path) for path in paths]
    size = file.size if file.parts else statuses[0].st_size  # that of a data set isn't the size of its files
    if (size, max(status.st_mtime_ns for status in statuses)) != (file.size, file.changed):
        raise UserError(
            f"{file.path}: changed while it was read, expected a file at rest; remove the output folder and run the "
            "same command again"
        )
    return digest


def _build(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    executor: Executor,
    report: Report,
    splits: dict,
    work: Path,
    progress: Progress,
) -> dict[int, dict[str, list[ShardReport]]]:
    """Build every shard of every split and length; reports by length and split, in the order of the shards."""
    tasks, places = [], []
    for length in config.lengths:
        for split in SPLITS:
            low, high = splits[split]
            if low == high:
                continue
            for number, part in enumerate(plan_shards(report, low, high, config.shards.target_tokens)):
                tasks.append(
                    BuildTask(
                        split=split,
                        number=number,
                        low=part.low,
                        high=part.high,
                        parts=report.parts,
                        weights=[source.weight for source in config.all_sources],
                        preparation=config.preparation(length),
                        tokenizer=str((Path(config.output) / TOKENIZER_FOLDER).resolve()),
                        fingerprint=tokenizer.fingerprint,
                        folder=str(work.resolve()),
                        output=str(length_folder(config, length).resolve()),
                        estimated_tokens=part.tokens,
                    )
                )
                places.append((length, split))
    weights = [task.estimated_tokens for task in tasks]
    progress.stage("build", sum(weights), "tokens")
    results: list[ShardReport | None] = [None] * len(tasks)

    def on_result(place: int, result: ShardReport) -> None:
        results[place] = result
        counts = result.counts
        progress.advance(weights[place], counts["documents"], counts.get("tokens", 0))

    run_tasks(executor, build, tasks, weights, on_result)
    built = {length: {split: [] for split in SPLITS} for length in config.lengths}
    for (length, split), result in zip(places, results, strict=True):
        built[length][split].append(result)
    return built


def _publish(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    files: list[InputFile],
    hashes: list[str | None],
    report: Report,
    built: dict[str, list[ShardReport]],
    length: int,
) -> Manifest:
    """Everything but the manifest itself; returns that."""
    folder = length_folder(config, length)
    if folder != Path(config.output):
        copy_tokenizer(Tokenizer.from_folder(Path(config.output) / TOKENIZER_FOLDER), folder / TOKENIZER_FOLDER)
    unigrams = sum((result.unigrams for result in built["train"]), np.zeros(tokenizer.vocab_size, np.int64))
    splits = {split: _split_info(results, length) for split, results in built.items()}
    if not splits["train"].counts.get("samples"):
        raise UserError("input: found no sample for the train split, expected some; give more text")
    counts = dict(sorted(report.counts.items()))
    for name in ("documents", "documents_duplicate", "documents_short", "tokens_duplicate", "tokens_short"):
        counts[name] = sum(result.counts[name] for results in built.values() for result in results)
    return Manifest(
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        objective=config.samples.objective,
        max_length=length,
        mask_sets=config.stored_mask_sets,
        pair_sets=config.samples.pair_sets,
        seed=config.seed,
        preparation=json.loads(json.dumps(config.preparation(length))),
        sources=[
            {"source": file.source, "name": file.name, "bytes": file.size, "sha256": digest}
            for file, digest in zip(files, hashes, strict=True)
        ],
        counts=counts,
        unigram_entropy=entropy(unigrams),
        splits=splits,
        more_lengths=config.more_lengths if folder == Path(config.output) else [],
        tokenizer_files={name: sha256_of(folder / TOKENIZER_FOLDER / name) for name in FILES},
        folder=folder,
    )


def _split_info(results: list[ShardReport], length: int) -> SplitInfo:
    counts = {"samples": 0, "tokens": 0}  # which an empty split has too
    histogram = np.zeros(length + 1, np.int64)
    for result in results:
        histogram += np.array(result.length_histogram)
        for name, count in result.counts.items():
            counts[name] = counts.get(name, 0) + count
    shards = ShardTable.of(shard for result in results for shard in result.shards if shard.samples)
    return SplitInfo(counts=counts, length_histogram=histogram.tolist(), shards=shards)
