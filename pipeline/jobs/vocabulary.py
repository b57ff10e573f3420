"""`cloze vocab`: trains a vocabulary (WordPiece, Unigram, byte-level BPE, words, characters) on raw text.

Words are counted in parallel with the same array operations as in tokenization; the `tokenizers` library trains on the
counts, in a time that hardly depends on the size of the corpus.
"""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from cloze.pipeline.config import PrepareConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.executors import open_executor, run_tasks
from cloze.pipeline.jobs.extending import ADDED, Extension, extend, tokenizer_to_extend
from cloze.pipeline.progress import SILENT, Progress
from cloze.pipeline.readers import plan, read
from cloze.pipeline.readers.files import Segment
from cloze.pipeline.storage import ASIDE, alone, publishing, readable_errors, remove_tree, sha256_of
from cloze.pipeline.stores.places import Place, StorePath, to_output, to_place
from cloze.pipeline.tokenization.backends import add_special_tokens, wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import FILES, Tokenizer, readable_panics
from cloze.pipeline.tokenization.words import WordSplitter, word_of

_CHUNK_BYTES = 2 << 20
_HELD_WORDS = 2 << 20  # distinct words per worker (some 300 MB); beyond, the least frequent are dropped
# The same for the counts of all tasks: the WordPiece trainer needs some 1.2 KB for each. In English prose the dropped
# words occur a few times in gigabytes.
_COUNTED_WORDS = 1 << 22
_FED_WORDS = 1 << 27  # maximum occurrences given to the trainer; counts of larger corpora are scaled down
_FED_BYTES = 1 << 14  # characters of a string for the trainer
_LOCK = ".lock"
MAX_WORD_BYTES = 1024  # longer "words" are noise, and the trainer's time is quadratic in their length


@dataclass(frozen=True)
class CountTask:
    """Count the words of some segments."""

    number: int
    segments: list[Segment]
    config: VocabularyConfig
    folder: str
    extend: str | None = None
    """The tokenizer whose rules divide words; None: those of the kind of vocabulary."""


@dataclass(frozen=True)
class CountedWords:
    """The file in which a task has written its words, its SHA-256, and the number of documents."""

    path: Place
    sha256: str
    documents: int

    def read(self) -> pa.Table:
        """The words and their counts.

        Raises:
            UserError: the file has other content than was written.
        """
        with readable_errors(self.path):
            content = self.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(
                f"{self.path}: found other bytes than were written, expected them; run the same command again"
            )
        return pa.ipc.open_file(pa.py_buffer(content)).read_all()


def train_vocabulary(config: PrepareConfig, progress: Progress = SILENT) -> Tokenizer:
    """Train the vocabulary of `config.vocabulary` and write a tokenizer's folder to `config.output`.

    Deterministic: the same input gives the same vocabulary for any number of workers.

    Raises:
        UserError: the folder holds other files, or the text has too few words.
    """
    output = _open_output(config)
    with _alone_in(output, progress):
        return _train(config, output, progress)


def _train(config: PrepareConfig, output: Place, progress: Progress) -> Tokenizer:
    counts = _counted(config, progress)
    names = config.vocabulary.special_tokens
    progress.stage("train", 1, "vocabulary")
    backend = _TRAINERS[config.vocabulary.model](config, counts, names)
    add_special_tokens(backend, names)
    tokenizer = Tokenizer(backend, {role: names[role] for role in sorted(names)}, output)
    with readable_errors(output):
        if (output / ADDED).is_file():  # of an earlier vocabulary that was extended
            (output / ADDED).unlink()
        tokenizer.save(output)
    progress.advance(1, 0, 0)
    if tokenizer.vocab_size > config.vocab_size:
        progress.note(
            f"the vocabulary has {tokenizer.vocab_size} entries, not {config.vocab_size}: that many special "
            "tokens and characters exist (vocabulary.alphabet lowers their number for wordpiece)"
        )
    if tokenizer.vocab_size < config.vocab_size:
        progress.note(
            f"the vocabulary has {tokenizer.vocab_size} entries, not {config.vocab_size}: the text contains no "
            f"more (min_frequency {config.vocabulary.min_frequency})"
        )
    _check_there(output)
    return Tokenizer.from_folder(output)


def extend_vocabulary(config: PrepareConfig, progress: Progress = SILENT) -> Extension:
    """Add the words of `config.input` that the tokenizer `config.extend` cuts into pieces; writes `config.output`.

    Raises:
        UserError: the tokenizer can't be extended, the output is its folder or holds other files, or the text has
            nothing to add.
    """
    old = tokenizer_to_extend(config.extend or "")
    output = _open_output(config)
    if old.folder is not None and output.resolve() == old.folder.resolve():
        raise UserError(
            f"output: found {output}, which holds the tokenizer to extend, expected another folder: models and shards "
            "of the old tokenizer need it"
        )
    usual = VocabularyConfig(add=config.vocabulary.add, min_frequency=config.vocabulary.min_frequency)
    given = [
        f"vocabulary.{each.name}"
        for each in fields(usual)
        if getattr(config.vocabulary, each.name) != getattr(usual, each.name)
    ]
    if config.vocab_size != PrepareConfig.vocab_size:
        given.append("vocab_size")
    if given:
        progress.note(f"{', '.join(given)}: not used with extend: the tokenizer keeps its own")
    with _alone_in(output, progress):
        counts = _counted(config, progress)
        progress.stage("extend", 1, "vocabulary")
        with readable_errors(output):
            extension = extend(old, counts, config.vocabulary.add, config.vocabulary.min_frequency, output)
    _check_there(output)
    progress.advance(1, 0, 0)
    if len(extension.added) < config.vocabulary.add:
        progress.note(
            f"{len(extension.added)} tokens were added, not {config.vocabulary.add}: the text has no more that occur "
            f"{config.vocabulary.min_frequency} times"
        )
    if extension.without_pieces:
        progress.note(extension.without_pieces)
    return extension


def _check_there(output: Place) -> None:
    """Raise UserError if a file of the tokenizer that was written is not there any more."""
    for name in FILES:
        if not (output / name).is_file():
            raise UserError(
                f"{output}: found no {name}, expected it as it was written: something was removed meanwhile; run the "
                "same command again"
            )


@contextmanager
def _alone_in(output: Place, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock, or its lease in a store."""
    with alone(output, output / _LOCK, progress.note):
        try:
            yield
        finally:
            if not isinstance(output, StorePath):  # in a store the lease deletes its object itself
                (output / _LOCK).unlink(missing_ok=True)


def _counted(config: PrepareConfig, progress: Progress) -> dict[str, int]:
    """Counts of the words of the input."""
    _, tasks = plan(config, progress.note)
    if any(source.weight != 1.0 for source in config.all_sources):
        progress.note("the words of each document are counted once: weights of sources are for `cloze prepare`")
    counts = _count_all(config, tasks, progress)
    if not counts:
        raise UserError("input: found no word in it, expected text; look at --source.format and text_field")
    return counts


def _open_output(config: PrepareConfig) -> Place:
    output = to_output(config.output)
    ours = {*FILES, ADDED, _LOCK}
    with readable_errors(output):
        if not isinstance(output, StorePath):
            output.mkdir(parents=True, exist_ok=True)
        foreign = sorted({path.name for path in output.iterdir() if not path.name.startswith(".tmp-")} - ours)
    if foreign:
        raise UserError(f"output: {output} holds {foreign[0]!r}, expected a new or empty folder; choose another")
    return output


def _count_all(config: PrepareConfig, tasks: list[list[Segment]], progress: Progress) -> dict[str, int]:
    """Counts of all normalised words, in order of code points."""
    weights = [sum(segment.weight for segment in task) for task in tasks]
    progress.stage("count words", sum(weights), "bytes")
    with _work_folder(to_place(config.output)) as folder:
        jobs = [
            CountTask(n, task, config.vocabulary, str(folder.resolve()), config.extend) for n, task in enumerate(tasks)
        ]
        results: dict[int, CountedWords] = {}

        def on_result(number: int, result: CountedWords) -> None:
            results[number] = result
            progress.advance(weights[number], result.documents, 0)

        with open_executor(config) as executor:
            run_tasks(executor, count_words, jobs.__getitem__, weights, on_result)
        counts: Counter[str] = Counter()
        for number in range(len(jobs)):
            table = results[number].read()
            counts.update(dict(zip(table["word"].to_pylist(), table["count"].to_pylist(), strict=True)))
            if len(counts) > _COUNTED_WORDS:  # in the order of the tasks, so that the result depends only on the input
                counts = _most_frequent(counts, _COUNTED_WORDS // 2)
    return dict(sorted(counts.items()))


@contextmanager
def _work_folder(output: Place) -> Iterator[Place]:
    """A temporary folder in the output for the counts of tasks; that of a killed run is removed by the next."""
    folder = output / f"{ASIDE}count-{uuid.uuid4().hex[:12]}"
    if not isinstance(folder, StorePath):
        folder.mkdir()
    try:
        yield folder
    finally:
        remove_tree(folder)


def count_words(task: CountTask) -> CountedWords:
    """Count normalised words into a file."""
    with readable_panics(lambda: to_place(task.extend) if task.extend else None):
        return _count_words(task)


def _count_words(task: CountTask) -> CountedWords:
    if task.extend:
        backend = tokenizer_to_extend(task.extend).backend
    else:
        backend = tokenizers.Tokenizer(models.WordLevel({}, unk_token="[UNK]"))
        _set_rules(backend, task.config)
    splitter = WordSplitter(backend)
    raw: Counter[Any] = Counter()
    chunk: list[bytes] = []
    size = documents = 0
    for document in read(task.segments):
        chunk.append(document.text)
        size += len(document.text)
        documents += 1
        if size >= _CHUNK_BYTES:
            _count_chunk(chunk, splitter, raw)
            chunk, size = [], 0
            if len(raw) > _HELD_WORDS:
                raw = _most_frequent(raw, _HELD_WORDS // 2)
    _count_chunk(chunk, splitter, raw)
    counts: Counter[str] = Counter()
    for word, count in raw.items():
        # Byte-level words are normalised already.
        for part in [word] if splitter.reason else splitter.parts(word_of(word)):
            if len(part.encode()) <= MAX_WORD_BYTES:
                counts[part] += count
    words = sorted(counts)
    path = to_place(task.folder) / f"words-{task.number:06d}.arrow"
    table = pa.table({"word": pa.array(words, pa.string()), "count": pa.array([counts[w] for w in words], pa.int64())})
    with publishing(path) as aside:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        digest = sha256_of(aside)
    return CountedWords(path, digest, documents)


def _most_frequent(raw: Counter[Any], kept: int) -> Counter[Any]:
    ordered = sorted(raw.items(), key=lambda item: (-item[1], word_of(item[0])))
    return Counter(dict(ordered[:kept]))


def _count_chunk(chunk: list[bytes], splitter: WordSplitter, counts: Counter[Any]) -> None:
    if not chunk:
        return
    text = b"\n".join(chunk)
    if splitter.reason:  # byte-level words include the space before them
        parts = (part for piece in text.decode().split("\n") for part in splitter.parts(piece))
        counts.update(part for part in parts if len(part.encode()) <= MAX_WORD_BYTES)
        return
    keys, word, _ = splitter.distinct(text)
    times = np.bincount(word, minlength=len(keys)).tolist()
    counts.update({key: count for key, count in zip(keys, times, strict=True) if count and _has_word(key, splitter)})


def _has_word(key: int | str, splitter: WordSplitter) -> bool:
    """Whether the normalised word is neither empty nor too long; checked early, since noise would fill the memory."""
    if isinstance(key, int) or len(key) * 4 <= MAX_WORD_BYTES or len(key.encode()) <= MAX_WORD_BYTES:
        return True
    return any(len(part.encode()) <= MAX_WORD_BYTES for part in splitter.parts(key))


def _set_rules(backend: tokenizers.Tokenizer, config: VocabularyConfig) -> None:
    """Set the normaliser and pre-tokenizer of a kind of vocabulary."""
    if config.model == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif config.model == "wordpiece":
        backend.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase, strip_accents=config.strip_accents)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        accents = config.lowercase if config.strip_accents is None else config.strip_accents
        parts = [normalizers.NFD(), normalizers.StripAccents()] if accents else []
        parts += [normalizers.Lowercase()] if config.lowercase else []
        parts += [normalizers.NFKC()] if config.model == "unigram" else []
        if parts:
            backend.normalizer = normalizers.Sequence(parts)
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def _fed(counts: dict[str, int]) -> Iterator[str]:
    """Strings for the trainer in which each word is repeated by its count, separated by spaces."""
    scale = min(1.0, _FED_WORDS / sum(counts.values()))
    held: list[str] = []
    size = 0
    for word, count in counts.items():
        left = max(1, round(count * scale))
        at_once = max(1, _FED_BYTES // (len(word) + 1))
        while left:
            times = min(left, at_once)
            held.append((word + " ") * times)
            size += len(held[-1])
            left -= times
            if size >= _FED_BYTES:
                yield "".join(held)
                held, size = [], 0
    yield "".join(held)


# The library's WordPiece trainer numbers continuing characters in the order of a hash map and breaks ties by those
# numbers, so its result differs between runs. With words written in private-use characters, one for a character at the
# beginning of a word and another for the same character inside, it becomes a plain BPE problem, whose solution is
# deterministic.
_BEGINNING, _INSIDE = 0xF0000, 0x100000


def _train_wordpiece(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> tokenizers.Tokenizer:
    vocabulary = config.vocabulary
    characters = _alphabet(counts, vocabulary.alphabet)
    beginning = {character: chr(_BEGINNING + number) for number, character in enumerate(characters)}
    inside = {character: chr(_INSIDE + number) for number, character in enumerate(characters)}
    coded = {
        beginning[word[0]] + "".join([inside[character] for character in word[1:]]): count
        for word, count in counts.items()
        if beginning.keys() >= set(word)
    }
    if not coded:
        raise UserError(
            f"vocabulary.alphabet: found {vocabulary.alphabet}, expected characters of which a word of the input is; "
            "raise it"
        )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=max(1, config.vocab_size - len(names)),
        min_frequency=vocabulary.min_frequency,
        initial_alphabet=list(beginning.values()),
        show_progress=False,
    )
    learner.train_from_iterator(_fed(coded), trainer)
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    tokens = [*names.values()]
    for token, _ in learned:
        plain = "".join(characters[ord(code) & 0xFFFF] for code in token)
        tokens.append(plain if ord(token[0]) < _INSIDE else f"##{plain}")
    listed = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return wordpiece_backend(listed, names, vocabulary.lowercase, vocabulary.strip_accents)


def _characters(counts: dict[str, int]) -> Counter[str]:
    """How often each character occurs in words with these counts."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    return characters


def _alphabet(counts: dict[str, int], most: int) -> list[str]:
    """The most frequent characters, in order of code points."""
    characters = _characters(counts)
    return sorted(sorted(characters, key=lambda character: (-characters[character], character))[:most])


def _train_bytes(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # the counted words are byte-level characters already
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.vocabulary.min_frequency,
        special_tokens=list(names.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_fed(counts), trainer)
    backend.decoder = decoders.ByteLevel()
    _set_rules(backend, config.vocabulary)
    return backend


def _from_list(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> dict[str, int]:
    """Token ids: special tokens, then entries by frequency, ties by code point."""
    kept = [
        word
        for word, count in counts.items()
        if count >= config.vocabulary.min_frequency and word not in names.values()
    ]
    kept.sort(key=lambda word: (-counts[word], word))
    return {token: number for number, token in enumerate([*names.values(), *kept][: config.vocab_size])}


# The score of a special token, below that of any other pieces for its characters: a text that has its name is text.
_NEVER = -1e6


def _train_unigram(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> tokenizers.Tokenizer:
    """A Unigram model with `▁` before each word, as XLM-R's: pieces with scores (Kudo 2018)."""
    vocabulary = config.vocabulary
    characters = set(_alphabet(counts, vocabulary.alphabet))
    kept = {
        word: count for word, count in counts.items() if count >= vocabulary.min_frequency and characters >= set(word)
    }
    if not kept:
        raise UserError(
            f"input: found no word {vocabulary.min_frequency} times in it, of the {len(characters)} characters that "
            "are kept, expected one; lower vocabulary.min_frequency, or raise vocabulary.alphabet"
        )
    # Tried with tokenizers 0.23: with fewer the trainer raises an error of its own or gives more pieces than it should.
    needed = len(names) + len(set("▁").union(*kept)) + 1
    if config.vocab_size < needed:
        raise UserError(
            f"vocab_size: found {config.vocab_size}, expected at least {needed}: the special tokens, the characters of "
            "the words and a piece; raise it, or lower vocabulary.alphabet"
        )
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(names.values()),
        unk_token=names["unknown"],
        show_progress=False,
    )
    learner.train_from_iterator(_fed(kept), trainer)
    learned = json.loads(learner.to_str())["model"]["vocab"][len(names) :]
    learned = [piece for piece in learned if piece[0] not in names.values()]  # which a text may be full of
    pieces = [(name, _NEVER) for name in names.values()] + _in_order(learned)
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=list(names).index("unknown")))
    _set_rules(backend, vocabulary)
    backend.pre_tokenizer = learner.pre_tokenizer
    backend.decoder = decoders.Metaspace()
    return backend


def _in_order(learned: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Pieces by score, ties by code point. The library gives characters that its model has dropped the lowest score
    plus 0.0001, 0.0002 and so on in the order of a hash map, which differs from run to run: here by code point.
    """
    lowest = min(score for _, score in learned)

    def step(piece: str, score: float) -> bool:
        steps = (score - lowest) / 1e-4
        return len(piece) == 1 and steps < len(learned) and abs(steps - round(steps)) < 1e-6

    rounded = [(piece, round(score, 9)) for piece, score in learned]  # sums differ in their last bits
    dropped = sorted(piece for piece, score in learned if step(piece, score))
    scores = sorted((score for piece, score in rounded if piece in set(dropped)), reverse=True)
    scored = dict(rounded) | dict(zip(dropped, scores, strict=True))
    return sorted(scored.items(), key=lambda item: (-item[1], item[0]))


def _train_words(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(_from_list(config, counts, names), unk_token=names["unknown"]))
    _set_rules(backend, config.vocabulary)
    return backend


def _train_characters(config: PrepareConfig, counts: dict[str, int], names: dict[str, str]) -> tokenizers.Tokenizer:
    listed = _from_list(config, dict(sorted(_characters(counts).items())), names)
    backend = tokenizers.Tokenizer(models.WordLevel(listed, unk_token=names["unknown"]))
    _set_rules(backend, config.vocabulary)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokenizers.Regex("."), "isolated")]
    )
    backend.decoder = decoders.Fuse()
    return backend


_TRAINERS = {
    "wordpiece": _train_wordpiece,
    "words": _train_words,
    "bytes": _train_bytes,
    "characters": _train_characters,
    "unigram": _train_unigram,
}
