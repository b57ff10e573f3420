"""`cloze prepare`: text to shards, in two stages, restartable at any moment.

Stage 1 tokenizes the input and distributes documents by the hash of their text (tokenize_stage.py); stage 2 builds a
shard from each range of hashes (build_stage.py). Large corpora need exchange rounds between them (exchange_stage.py).
Tasks depend only on the input and the configuration, write files (in a store: objects) atomically, and write a part or
a report when they are complete. A repeated command therefore does only the remaining work, and the bytes are the same
for any number of workers. This process plans, distributes tasks, and sums their reports. The manifest is written last.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs.build_stage import BuildTask, ShardReport, build
from cloze.pipeline.jobs.estimating import check_disk, estimate
from cloze.pipeline.jobs.exchange_stage import FILES_AT_ONCE, ExchangeLayout, ExchangeTask, exchange
from cloze.pipeline.jobs.executors import open_executor, run_tasks
from cloze.pipeline.jobs.parts import DamagedPart
from cloze.pipeline.jobs.resuming import check_touched, go_on_as, has_reports
from cloze.pipeline.jobs.shard_sizes import plan_shards
from cloze.pipeline.jobs.source_hashes import SourceHashes, source_hash
from cloze.pipeline.jobs.splits import TooLittleText, plan_splits
from cloze.pipeline.jobs.tokenize_stage import Report, TokenizeTask, report_name, splitter_of, tokenize
from cloze.pipeline.progress import SILENT, Progress
from cloze.pipeline.readers import plan, remark_on_documents, remark_on_text
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.samples.masking import check_words
from cloze.pipeline.shards.manifest import (
    FILE_NAME,
    SPLITS,
    TOKENIZER_FOLDER,
    WORK_FOLDER,
    Manifest,
    ShardInfo,
    ShardTable,
    SplitInfo,
    entropy,
    has_lost_manifest,
)
from cloze.pipeline.shards.reader import fault_of_shards
from cloze.pipeline.storage import alone, publish_text, readable_errors, remove_tree, sha256_of
from cloze.pipeline.stores.places import Place, StorePath, to_output, to_place
from cloze.pipeline.tokenization.tokenizer import FILES, Tokenizer, copy_tokenizer, described_in_copy
from cloze.pipeline.untrusted import check_readable, load_json

# Version of the rules for words, sentences, samples and masks. Increased when the same input gives other ids or masks:
# an interrupted run must not be finished with other rules.
_RULES = 4
_OF_EACH_FILE = ("sources", "times of change", "ETags")  # of what a run is known by
_IDENTITY = "run.json"  # file of the work folder
_CLOCKS_APART = 600 * 10**9  # nanoseconds by which a store's clock may be ahead of this machine's


def prepare(config: PrepareConfig, progress: Progress = SILENT) -> Manifest:
    """Prepare a corpus into `config.output` and return its manifest (that of `max_length`, if there are several).

    Continues an interrupted run of the same command; returns at once if it is complete.

    Raises:
        UserError: the folder holds another run, and for other errors that a user can fix.
    """
    output = to_output(config.output)
    if not config.tokenizer:
        raise UserError(
            "tokenizer: found none, expected a folder that `cloze vocab` wrote, a tokenizer.json or a vocab.txt; "
            "name one with --tokenizer"
        )
    tokenizer = Tokenizer.from_folder(config.tokenizer)
    check_words(config.masking.strategy, tokenizer)
    files, segments = plan(config, progress.note)
    identity = _identity(config, tokenizer, files, segments)
    work = output / WORK_FOLDER
    if (complete := _complete(config, identity, tokenizer, files, output)) is not None:
        progress.note(f"{output} is complete already")
        _remove_work(work, progress)  # left by a kill between publishing and cleaning
        return complete
    if (remark := remark_on_text(files)) is not None:
        progress.note(remark)
    _make_work(output, work)
    with alone(output, work / "lock", progress.note) as check:
        own = _open_work(output, work, identity, progress.note)
        try:
            _run(config, tokenizer, files, segments, own, progress, check)
        except TooLittleText:
            remove_tree(own)  # so that another command, as with another format, begins anew
            raise
    _remove_work(work, progress)
    return Manifest.load(output)


def _remove_work(work: Place, progress: Progress) -> None:
    """Remove the work folder. A failure is only a remark: on a cluster, tasks of a killed command may still write
    there.
    """
    if not remove_tree(work):
        progress.note(f"{work} could not be removed; it is no longer needed: remove it, or run this command again")


@dataclass(frozen=True)
class _Run:
    """The values that all steps share.

    Args:
        tokenizer_files: hashes of its copy.
        tasks: the segments of each task of stage 1.
        work: the folder of its reports and parts.
        check: raises UserError if another command may have taken over the output.
    """

    config: PrepareConfig
    tokenizer: Tokenizer
    tokenizer_files: dict[str, str]
    files: list[InputFile]
    tasks: list[list[Segment]]
    work: Place
    executor: Executor
    progress: Progress
    check: Callable[[], None]

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer's copy that workers read."""
        return str((to_place(self.config.output) / TOKENIZER_FOLDER).resolve())

    @property
    def weights(self) -> list[float]:
        return [source.weight for source in self.config.all_sources]


@dataclass
class _Built:
    """The totals of a split at a length.

    Args:
        shards: those of each task, in the order of their hashes.
    """

    shards: list[list[ShardInfo]]
    length_histogram: np.ndarray
    unigrams: np.ndarray
    # also needed for an empty split
    counts: dict[str, int] = field(default_factory=lambda: {"samples": 0, "tokens": 0})

    def add(self, number: int, report: ShardReport) -> None:
        self.shards[number] = [shard for shard in report.shards if shard.samples]
        self.length_histogram += np.array(report.length_histogram)
        self.unigrams += report.unigrams
        for name, count in report.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    @property
    def info(self) -> SplitInfo:
        shards = ShardTable.of(shard for made in self.shards for shard in made)
        return SplitInfo(counts=self.counts, length_histogram=self.length_histogram.tolist(), shards=shards)


def _run(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    files: list[InputFile],
    segments: list[list[Segment]],
    work: Place,
    progress: Progress,
    check: Callable[[], None],
) -> None:
    """Run both stages, and write the manifests."""
    hashes = SourceHashes(files, segments)
    check_touched(files, segments, hashes, work, progress.note)
    if tokenizer.word_table_reason:
        progress.note(f"the word table is off ({tokenizer.word_table_reason}): tokenizing runs at the library's speed")
    if tokenizer.leaves_out:
        progress.note(
            "the tokenizer's BPE model has no unk_token, and no token for some bytes: characters that its vocabulary "
            "lacks are left out of the text (train it with the alphabet of all bytes, or give it an unk_token)"
        )
    with open_executor(config) as executor:  # worker processes start while this one estimates
        if (expected := estimate(config, tokenizer, files, segments)) is not None:
            if isinstance(work, Path):
                check_disk(expected, work.parents[1])
            progress.note(f"estimate: {expected}")
        # Workers read this copy.
        written = copy_tokenizer(tokenizer, to_place(config.output) / TOKENIZER_FOLDER)
        run = _Run(config, tokenizer, written, files, segments, work, executor, progress, check)
        report, parts = _tokenize(run, hashes)
        if (remark := remark_on_documents(files, report.counts.get("documents_read", 0))) is not None:
            progress.note(remark)
        built = _make_shards(run, hashes, report, ExchangeLayout(parts, FILES_AT_ONCE))
        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(executor.shutdown)  # worker processes end while this one publishes
            sources = [
                {"source": file.source, "name": file.name, "bytes": file.size, **hashes.of(file)} for file in files
            ]
            manifests = [_publish(run, sources, report, built[length], length) for length in config.lengths]
            for manifest in manifests:
                _check_there(manifest, "something changed the folder meanwhile; run the same command again")
            check()
            # the manifest of the output folder itself last: it marks the output as complete
            for manifest in manifests[::-1]:
                manifest.save(manifest.folder)


def length_folder(config: PrepareConfig, length: int) -> Place:
    """Folder of the shards of a length: OUTPUT, or OUTPUT/length-N for additional lengths."""
    return to_place(config.output) if length == config.max_length else to_place(config.output) / f"length-{length}"


def _identity(
    config: PrepareConfig, tokenizer: Tokenizer, files: list[InputFile], segments: list[list[Segment]]
) -> Fields:
    """The identity of a run: everything that determines its bytes and its tasks, as JSON values so that it can be
    compared after a round trip.
    """
    tasks = json.dumps([[[part.file.number, part.start, part.stop] for part in task] for task in segments])
    return {
        "preparation": json.loads(json.dumps(config.preparation(config.max_length))),
        "lengths": config.lengths,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "sources": [[file.source, file.name, file.size] for file in files],
        "times of change": [0 if file.content else file.changed for file in files],
        **({"ETags": [file.content for file in files]} if any(file.content for file in files) else {}),
        "rules": _RULES,
        "parts read at once": FILES_AT_ONCE,
        # Other versions of pyarrow may write other bytes.
        "library versions": {each.__name__: each.__version__ for each in (np, pa, tokenizers)},
        "division of the input": hashlib.sha256(tasks.encode()).hexdigest(),
    }


def _complete(
    config: PrepareConfig, identity: Fields, tokenizer: Tokenizer, files: list[InputFile], output: Place
) -> Manifest | None:
    """The manifest of a complete run of the same command, or None; UserError for another command's."""
    if not (output / FILE_NAME).is_file():
        return None
    manifest = Manifest.load(output)
    prepared = {
        "preparation": manifest.preparation,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "sources": [[source.get("source", 0), source["name"], source["bytes"]] for source in manifest.sources],
    }
    different = [name for name, value in prepared.items() if value != identity[name]]
    if different:
        raise UserError(
            f"output: {output} holds data prepared with another {_difference(prepared, identity, different[0])}; "
            "choose another --output or remove the folder"
        )
    # What the fingerprint does not show, such as the longest text and the class for transformers, goes out with models.
    # (A run that is interrupted has nothing of it: the one that goes on copies the tokenizer anew.)
    described = tokenizer.contents(described_in_copy(tokenizer))["tokenizer_config.json"]
    if manifest.tokenizer_hashes.get("tokenizer_config.json") not in (
        None,
        hashlib.sha256(described).hexdigest(),
    ):
        raise UserError(
            f"output: {output} holds data prepared with another tokenizer_config.json of {tokenizer.folder}, whose "
            "content has changed since; restore it, choose another --output or remove the folder"
        )
    published = (output / FILE_NAME).stat().st_mtime_ns
    if isinstance(output, StorePath):
        published -= _CLOCKS_APART
    for file, source in zip(files, manifest.sources, strict=True):
        digest = source.get("sha256")
        changed = digest and max(file.changed, file.touched) >= published
        if changed and source_hash(file, source.get("piece_bytes")) != digest:
            raise UserError(
                f"output: {output} holds data prepared from other content of {file.path}, which has changed since; "
                "choose another --output or remove the folder"
            )
    missing = [length for length in config.lengths if not (length_folder(config, length) / FILE_NAME).is_file()]
    if missing:
        raise UserError(
            f"output: {output} is complete, but not with more_lengths {missing}; choose another --output or remove the "
            "folder"
        )
    for length in config.lengths:
        made = manifest if length == config.max_length else Manifest.load(length_folder(config, length))
        _check_there(made, f"restore it, or remove {output} and run the same command again")
    return manifest


def _difference(found: Fields, expected: Fields, name: str) -> str:
    """The first difference of two identities, by name, with both values if they are short, or with the file's name."""
    old, new = found.get(name), expected.get(name)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        number = next(number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        if name in _OF_EACH_FILE and not isinstance(new[number], dict):
            return f"{name} of {expected['sources'][number][1]}"
        old, new = old[number], new[number]
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            if old.get(key) != new[key]:
                return f"{name}." + _difference(old, new, key)
    values = f" ({found.get(name)!r}, now {expected.get(name)!r})"
    return name + (values if len(values) < 160 else "")


def _make_work(output: Place, work: Place) -> None:
    """Make the work folder, unless the output holds other files."""
    with readable_errors(output):
        if has_lost_manifest(output):
            raise UserError(
                f"output: {output} holds shards without their {FILE_NAME}, expected a new or empty folder; restore "
                "that file, choose another --output or remove the folder"
            )
        if not work.is_dir() and output.is_dir() and any(output.iterdir()):
            raise UserError(
                f"output: {output} holds other files, expected a new or empty folder; choose another --output"
            )
        if isinstance(work, Path):
            work.mkdir(parents=True, exist_ok=True)


def _open_work(output: Place, work: Place, identity: Fields, note: Callable[[str], None]) -> Place:
    """Begin or continue a run, alone in its folder. An interrupted run of another command of which no task is complete
    has nothing to lose, and is begun anew: mostly it stopped at something that the user has changed in the command.

    Returns:
        The folder of its reports and parts, whose name says whose they are: none of another run is taken for one of
        this.
    """
    own = work / f"run-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]}"
    with readable_errors(output):
        found = _identity_of(work)
        if found != identity:
            others = [path for path in work.iterdir() if path.name not in (own.name, _IDENTITY) and path.is_dir()]
            kept = any(map(has_reports, others))
            if found is None and kept:
                raise UserError(
                    f"output: {output} holds an interrupted run, whose command {work / _IDENTITY} should tell, but "
                    "that is missing or damaged; choose another --output, or remove the folder"
                )
            if found is not None:
                different = next(name for name in {**identity, **found} if found.get(name) != identity.get(name))
                what = f"{output} holds an interrupted run with another {_difference(found, identity, different)}"
                if kept and _has_no_errors(found, identity) and go_on_as(others, own):
                    note(f"{what}; what is complete has no such bytes, and is kept")
                elif kept:
                    raise UserError(
                        f"output: {what}; repeat that command, choose another --output, or remove the folder"
                    )
                else:
                    note(f"{what}; nothing of it was complete: it is begun anew")
            for stale in (*others, output / TOKENIZER_FOLDER):
                remove_tree(stale)
        if isinstance(own, Path):
            own.mkdir(exist_ok=True)
        if found != identity:
            publish_text(work / _IDENTITY, json.dumps(identity))
    return own


def _has_no_errors(found: Fields, identity: Fields) -> bool:
    """Whether a command differs from that of an interrupted run only in that it replaces bytes that are not UTF-8, at
    which the other one stopped: what that has completed of stage 1 has none, and is the same for both.
    """
    before, now = found["preparation"]["sources"], identity["preparation"]["sources"]
    changed = {**found, "preparation": {**found["preparation"], "sources": now}}
    return (
        changed == identity
        and len(before) == len(now)
        and all(
            old == new or {**old, "encoding_errors": "replace"} == new for old, new in zip(before, now, strict=True)
        )
    )


def _identity_of(work: Place) -> Fields | None:
    """What the run in a work folder is known by; None if that is missing or damaged."""
    check_readable(work / _IDENTITY)
    try:
        found: Fields = load_json((work / _IDENTITY).read_text(encoding="utf-8"))
        sources = found["preparation"]["sources"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(sources, list) and all(isinstance(each, dict) for each in sources) else None


def _tokenize(run: _Run, hashes: SourceHashes) -> tuple[Report, np.ndarray]:
    """Stage 1: the total of its tasks' reports, and the number of parts of each task."""
    whole, parts = Report(), np.zeros(len(run.tasks), np.int64)

    def on_report(number: int, report: Report) -> None:
        whole.add(**report.counts)
        whole.documents += report.documents
        whole.tokens += report.tokens
        parts[number] = report.parts
        hashes.add(number, report.digests)

    _run_stage_1(run, hashes, range(len(run.tasks)), on_report)
    return whole, parts


def _run_stage_1(
    run: _Run, hashes: SourceHashes, numbers: Sequence[int], on_report: Callable[[int, Report], None]
) -> None:
    """Run the tasks with these numbers, unless they are complete."""
    weights = [sum(segment.weight for segment in run.tasks[number]) for number in numbers]
    run.progress.stage("tokenize", sum(weights), "bytes")

    def task(place: int) -> TokenizeTask:
        segments = run.tasks[numbers[place]]
        return TokenizeTask(
            number=numbers[place],
            segments=segments,
            pieces=hashes.pieces(numbers[place], segments),
            splitter=splitter_of(segments[0].file, run.config),
            tokenizer=run.tokenizer_folder,
            fingerprint=run.tokenizer.fingerprint,
            folder=str(run.work.resolve()),
            weights=run.weights,
        )

    def on_result(place: int, report: Report) -> None:
        run.progress.advance(weights[place], report.counts.get("documents_read", 0), report.counts.get("tokens", 0))
        on_report(numbers[place], report)

    run_tasks(run.executor, tokenize, task, weights, on_result)


def _make_shards(
    run: _Run, hashes: SourceHashes, report: Report, layout: ExchangeLayout
) -> dict[int, dict[str, _Built]]:
    """The exchange rounds and stage 2. A damaged part is made again."""
    repaired = set()
    while True:
        try:
            _exchange(run, hashes, report, layout)
            splits, remarks = plan_splits(run.config, report, layout, run.work)
            for remark in remarks:
                run.progress.note(remark)
            return _build(run, report, layout, splits)
        except DamagedPart as damaged:
            if damaged.path in repaired:
                raise UserError(
                    f"{damaged.path}: damaged again after it was written again, expected a disk that keeps what is "
                    "written; choose another --output"
                ) from damaged
            repaired.add(damaged.path)
            run.progress.note(f"{damaged.path}: differs from what was written; it is rebuilt")
            damaged.path.unlink(missing_ok=True)


def _exchange(run: _Run, hashes: SourceHashes, report: Report, layout: ExchangeLayout) -> None:
    """Make the missing parts of the last round, and before them the missing parts that they need."""
    run.check()
    there = {path.name for path in run.work.iterdir() if path.name.endswith(".part")}
    wanted = [[number for number, name in enumerate(layout.names[-1]) if name not in there]]
    for level in range(layout.rounds, 0, -1):
        groups = {layout.sources(level, part) for part in wanted[0]}  # many parts share their sources
        needed = {number for group in groups for number in group}
        wanted.insert(0, [number for number in sorted(needed) if layout.names[level - 1][number] not in there])
    if tasks := layout.tasks(wanted[0]):  # tasks with reports whose parts are missing
        for number in tasks:
            (run.work / report_name(number)).unlink(missing_ok=True)
        _run_stage_1(run, hashes, tasks, lambda *_: None)
    for level in range(1, layout.rounds + 1):
        _run_round(run, report, layout, level, wanted[level])


def _run_round(run: _Run, report: Report, layout: ExchangeLayout, level: int, numbers: list[int]) -> None:
    """Make parts of one level, and then remove those of the previous level."""
    tokens = int(report.tokens.sum()) // max(1, len(layout.names[level]))  # an estimate, for the progress bar

    def task(place: int) -> ExchangeTask:
        sources = layout.sources(level, numbers[place])
        low, high = layout.bounds(level, numbers[place])
        return ExchangeTask(
            folder=str(run.work.resolve()),
            name=layout.names[level][numbers[place]],
            sources=layout.names[level - 1][sources.start : sources.stop],
            low=low,
            high=high,
            tokens=np.dtype(run.tokenizer.dtype).name,
        )

    if numbers:

        def on_result(_: int, counts: tuple[int, int]) -> None:
            run.progress.advance(tokens, *counts)

        run.progress.stage(f"exchange {level}", tokens * len(numbers), "tokens")
        run_tasks(run.executor, exchange, task, [1] * len(numbers), on_result)
    run.check()
    for path in run.work.iterdir():
        if path.name.endswith(".part") and path.name.startswith(layout.prefix(level - 1)):
            path.unlink(missing_ok=True)


def _build(run: _Run, report: Report, layout: ExchangeLayout, splits: Fields) -> dict[int, dict[str, _Built]]:
    """Build every shard of every split and length.

    Returns:
        The totals by length and split.
    """
    config = run.config
    plans = {
        split: plan_shards(report, low, high, config.shards.target_tokens) if low < high else []
        for split, (low, high) in splits.items()
    }
    built = {
        length: {
            split: _Built(
                shards=[[] for _ in plans[split]],
                length_histogram=np.zeros(length + 1, np.int64),
                unigrams=np.zeros(run.tokenizer.vocab_size, np.int64),
            )
            for split in SPLITS
        }
        for length in config.lengths
    }
    preparations = {length: config.preparation(length) for length in config.lengths}
    places = [
        (length, split, number) for length in config.lengths for split in SPLITS for number in range(len(plans[split]))
    ]
    weights = [plans[split][number].tokens for _, split, number in places]
    run.progress.stage("build", sum(weights), "tokens")

    def task(place: int) -> BuildTask:
        length, split, number = places[place]
        planned = plans[split][number]
        return BuildTask(
            split=split,
            number=number,
            low=planned.low,
            high=planned.high,
            parts=layout.covering(planned.low, planned.high),
            weights=run.weights,
            preparation=preparations[length],
            tokenizer=run.tokenizer_folder,
            fingerprint=run.tokenizer.fingerprint,
            vocab_size=run.tokenizer.vocab_size,
            folder=str(run.work.resolve()),
            output=str(length_folder(config, length).resolve()),
        )

    def on_result(place: int, result: ShardReport) -> None:
        length, split, number = places[place]
        built[length][split].add(number, result)
        run.progress.advance(weights[place], result.counts["documents"], result.counts.get("tokens", 0))

    run_tasks(run.executor, build, task, weights, on_result)
    return built


def _publish(run: _Run, sources: list[Fields], report: Report, built: dict[str, _Built], length: int) -> Manifest:
    """Publish everything except the manifest.

    Returns:
        The manifest.
    """
    config, tokenizer = run.config, run.tokenizer
    folder = length_folder(config, length)
    if folder != to_place(config.output):
        copy_tokenizer(Tokenizer.from_folder(to_place(config.output) / TOKENIZER_FOLDER), folder / TOKENIZER_FOLDER)
    splits = {split: made.info for split, made in built.items()}
    if not splits["train"].counts["samples"]:
        raise TooLittleText("input: found no sample for the train split, expected some; give more text")
    counts = dict(sorted(report.counts.items()))
    for name in ("documents", "documents_duplicate", "documents_short", "tokens_duplicate", "tokens_short"):
        counts[name] = sum(made.counts.get(name, 0) for made in built.values())
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
        sources=sources,
        counts=counts,
        unigram_entropy=entropy(built["train"].unigrams),
        splits=splits,
        more_lengths=config.more_lengths if folder == to_place(config.output) else [],
        tokenizer_files={name: run.tokenizer_files[name] for name in FILES},
        folder=folder,
    )


def _check_there(manifest: Manifest, advice: str) -> None:
    """Raise UserError, with `advice`, unless what a manifest names is there: something may have removed or changed it
    since. Of shards, which may be terabytes, the sizes tell.
    """
    for name, split in manifest.splits.items():
        if fault := fault_of_shards(manifest.folder, name, split.shards):
            raise UserError(f"{fault}; {advice}")
    for name, expected in manifest.tokenizer_hashes.items():
        path = manifest.tokenizer_folder / name
        with readable_errors(path):
            found = "no such" if not path.is_file() else "another" if sha256_of(path) != expected else None
        if found:
            raise UserError(f"{path}: found {found} file, expected it as it was written; {advice}")
