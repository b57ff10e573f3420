"""`cloze prepare`: text to shards, in two stages, restartable at any moment.

Stage 1 tokenizes the input and distributes documents by the hash of their text (tokenize_stage.py); stage 2 builds a
shard from each range of hashes (build_stage.py). Large corpora need exchange rounds between them (exchange_stage.py).
Tasks depend only on the input and the configuration, write files (in a store: objects) atomically, and write a part or
a report when they are complete. A repeated command therefore does only the remaining work, and the bytes are the same
for any number of workers. This process plans, distributes tasks, and sums their reports. The manifest is written last.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs.build_stage import BuildTask, ShardReport, build
from cloze.pipeline.jobs.estimating import check_disk, estimate
from cloze.pipeline.jobs.exchange_stage import FILES_AT_ONCE, ExchangeLayout, ExchangeTask, exchange
from cloze.pipeline.jobs.executors import open_executor, run_tasks
from cloze.pipeline.jobs.identity import (
    check_there,
    complete_manifest,
    length_folder,
    make_work,
    open_work,
    run_identity,
)
from cloze.pipeline.jobs.parts import DamagedPart
from cloze.pipeline.jobs.resuming import check_touched
from cloze.pipeline.jobs.shard_sizes import plan_shards
from cloze.pipeline.jobs.source_hashes import SourceHashes
from cloze.pipeline.jobs.splits import TooLittleText, plan_splits
from cloze.pipeline.jobs.tokenize_stage import Report, TokenizeTask, report_name, splitter_of, tokenize
from cloze.pipeline.progress import SILENT, Progress
from cloze.pipeline.readers import plan, remark_on_documents, remark_on_text
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.samples.masking import check_words
from cloze.pipeline.shards.manifest import (
    SPLITS,
    TOKENIZER_FOLDER,
    WORK_FOLDER,
    Manifest,
    ShardInfo,
    ShardTable,
    SplitInfo,
    entropy,
)
from cloze.pipeline.storage import alone, remove_tree
from cloze.pipeline.stores.places import Place, to_output, to_place
from cloze.pipeline.tokenization.tokenizer import FILES, Tokenizer, copy_tokenizer


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
    identity = run_identity(config, tokenizer, files, segments)
    work = output / WORK_FOLDER
    if (complete := complete_manifest(config, identity, tokenizer, files, output, progress.note)) is not None:
        _remove_work(work, progress)  # left by a kill between publishing and cleaning
        return complete
    if (remark := remark_on_text(files)) is not None:
        progress.note(remark)
    make_work(output, work)
    with alone(output, work / "lock", progress.note) as check:
        # The same command may have ended meanwhile.
        if complete_manifest(config, identity, tokenizer, files, output, progress.note) is None:
            own = open_work(output, work, identity, progress.note)
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
        written = copy_tokenizer(tokenizer, to_place(config.output) / TOKENIZER_FOLDER, check)
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
                check_there(manifest, "something changed the folder meanwhile; run the same command again")
            check()
            # the manifest of the output folder itself last: it marks the output as complete
            for manifest in manifests[::-1]:
                manifest.save(manifest.folder)


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
        own = Tokenizer.from_folder(to_place(config.output) / TOKENIZER_FOLDER)
        copy_tokenizer(own, folder / TOKENIZER_FOLDER, run.check)
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
