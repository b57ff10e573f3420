"""`Tokenizer`: text to ids; the `tokenizers` library encodes each distinct word once, the rest is Arrow and numpy.

The ids of a text depend only on its words, and a corpus has few distinct words. A chunk of text is divided into words
with array operations over its bytes, Arrow dictionary-encodes them, new words are encoded by `tokenizers` (words of
printable ASCII directly by its model, or by a lookup of whole words), and the ids are gathered from a table. Text is
divided only at sentence ends and where the tokenizer divides it in any context, which is tested once per character.
Everything else in a word (control characters, accents, characters that the normaliser deletes or splits) is left to the
tokenizer, so the ids are always those of the tokenizer.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import tokenizers

from cloze.pipeline import ragged
from cloze.pipeline.config import is_word
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.records import SpecialTokens, numpy_type, token_type
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import publishing
from cloze.pipeline.stores.places import Place, StorePath, to_place
from cloze.pipeline.stores.reading import fetched
from cloze.pipeline.tokenization.backends import (
    ADDED_TOKENS,
    CONFIG,
    HUGGING_FACE_NAMES,
    adds_space,
    byte_level,
    content_of,
    from_tokenizer_json,
    from_vocab_txt,
    has_all_bytes,
    model_of,
    named_class,
    parts,
    put_around_texts,
    read_tokenizer_config,
    rules_to_describe,
    space_begins_word,
    special_names,
    stand_around_texts,
    with_listed_tokens,
    with_special,
)
from cloze.pipeline.tokenization.growth import Growth
from cloze.pipeline.tokenization.words import WordSplitter, begins_word, word_of
from cloze.pipeline.untrusted import fields_if_readable, load_json, naming

_TABLE_WORDS = 1 << 20  # maximum words in the table, which is then cleared: some 200 MB with their strings
_TABLE_LETTERS = 1 << 25  # the same for their characters, since noise has words of thousands
_WORD_MODELS = {"WordPiece", "WordLevel"}
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")  # of a folder
_READ = ("tokenizer.json", "vocab.txt")  # of which a folder needs one; the first is read
FETCHED = (*FILES, "special_tokens_map.json", ADDED_TOKENS, CONFIG)  # of a folder in a store
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # the class of transformers that uses tokenizer.json as it is
# BERT has segments: without this transformers omits token_type_ids.
_MODEL_INPUT_NAMES = ["input_ids", "token_type_ids", "attention_mask"]
# Without `model_input_names` these classes of transformers give token types (and BERT's, where none is named); others
# don't, as TokenizersBackend.
_CLASSES_WITH_TYPES = (
    *("BertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"),
    "DebertaV2Tokenizer",
)
# These give them in transformers 4, and not in 5.
_CLASSES_WITH_TYPES_IN_4 = "AlbertTokenizer", "DebertaTokenizer"
_BASE_WITH_TYPES_IN_4 = "PreTrainedTokenizer"
# Published vocabularies leave some thousand ids without a token; tables have an entry for each id up to the highest.
_MOST_UNUSED_IDS = 1 << 20
_LONGEST_NAME = 200  # letters of a special token; the longest of released tokenizers have some 30
_MOST_SAID = 300  # characters of an error of the library
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def holds_tokenizer(folder: Place) -> bool:
    """Whether `Tokenizer.from_folder` finds files of a tokenizer in a folder."""
    return any((folder / name).is_file() for name in _READ)


@contextmanager
def readable_panics(folder: Callable[[], Place | None]) -> Iterator[None]:
    """Raise UserError where a rule of the tokenizer gives up on a text: a regular expression that tries too many ways
    ends as a panic of the library's Rust code, which is no Exception.

    Args:
        folder: says where the tokenizer was read from.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 exports no such class
            raise
        raise UserError(
            f"{folder() or 'tokenizer'}: found a rule that gives up on a text ({error}), expected normalizer, "
            "pre_tokenizer, post_processor and decoder of tokenizer.json to end on any text; correct their patterns"
        ) from error


def _with_readable_panics(
    method: Callable[Concatenate["Tokenizer", _Given], _Result],
) -> Callable[Concatenate["Tokenizer", _Given], _Result]:
    """Let a method raise UserError for `readable_panics`."""

    @wraps(method)
    def wrapped(self: "Tokenizer", /, *args: _Given.args, **options: _Given.kwargs) -> _Result:
        with readable_panics(lambda: self.folder):
            return method(self, *args, **options)

    return wrapped


class LocatedTokens(NamedTuple):
    """The tokens of a text and their places in it; all lists are (n,), one entry per token."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """First character and one past the last, without white space around them (byte-level tokens hold the space before a
    word); of white space alone both are the end."""
    continues: list[bool]
    """Whether a token goes on with the word of the one before, as the tokenizer cuts words."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the roles of its special tokens, and a table of words.

    Text never becomes one of its five special tokens: a literal [MASK] in a corpus is text. Further ones, such as marks
    of entities, are found in it.

    vocab_size: highest id + 1. fingerprint: SHA-256 of the content that determines the ids. special_tokens: ids by
    role. continues_word (vocab_size,) bool: ids of pieces that continue the word of the token before. word_table:
    whether the table of words can be used; if not, `word_table_reason` says why. leaves_out: whether characters that
    its vocabulary lacks are left out of a text, since the model has no token for them.

    Args:
        folder: where it was read from.
        split_special: whether further special tokens are text, too.
    """

    # concatenated ids of all words of the table; those of a row begin at _starts[row] and are _lengths[row]
    _flat: np.ndarray
    _starts: np.ndarray
    _lengths: np.ndarray

    @_with_readable_panics
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        names: dict[str, str],
        folder: Place | None = None,
        split_special: bool = False,
    ) -> None:
        self.folder, self._split_special = folder, split_special
        added = () if split_special else backend.get_added_tokens_decoder().values()
        self._marks = {each.content for each in added if each.special} - set(names.values())
        # The library finds special tokens in texts all together or not at all.
        self.backend = backend = with_special(backend, self._marks, False) if self._marks else backend
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self.names = names
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._check_ids(vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        missing = [f"{role} {name!r}" for role, name in names.items() if name not in vocabulary]
        if missing:
            raise UserError(
                f"{folder or 'tokenizer'}: found no token for {', '.join(missing)}, expected five special tokens; "
                "name them in tokenizer_config.json (pad_token, unk_token, cls_token, sep_token, mask_token)"
            )
        self._check_names()
        self.special_tokens = SpecialTokens(**{role: vocabulary[name] for role, name in names.items()})
        self.dtype = numpy_type(token_type(self.vocab_size))
        forbidden = [i for i in self.special_tokens.ids if i != self.special_tokens.unknown]
        self._as_text = np.arange(self.vocab_size, dtype=self.dtype)  # the model may have the special tokens as words
        self._as_text[forbidden] = self.special_tokens.unknown
        model = model_of(backend)
        self._whole_words = model["vocab"] if model["type"] == "WordLevel" else None
        unknown = model.get("unk_token")
        # BPE may have none, and needs none where each byte is a token. Tokens that were added are none of the model's.
        knows_all = model["type"] == "BPE" and has_all_bytes(backend)
        self.leaves_out = model["type"] == "BPE" and unknown is None and not knows_all
        if not (model["type"] == "Unigram" or knows_all or self.leaves_out) and unknown not in model["vocab"]:
            raise UserError(
                f"{folder or 'tokenizer'}: found no token for the model's unk_token {unknown!r}, expected "
                f"one of its vocabulary; write {names['unknown']!r} there in tokenizer.json"
            )
        if model["type"] == "Unigram" and model.get("unk_id") is None:  # which the library needs with byte_fallback too
            raise UserError(
                f"{folder or 'tokenizer'}: found no unk_id of its Unigram model, expected "
                f"{self.special_tokens.unknown}, the id of {names['unknown']!r}, for characters that it does not know; "
                "write it there in tokenizer.json"
            )
        given = model["vocab"][model["unk_id"]][0] if model["type"] == "Unigram" else unknown
        if given != names["unknown"] and not (knows_all or self.leaves_out):  # libraries differ in which one they put
            raise UserError(
                f"{folder or 'tokenizer'}: found {given!r} in tokenizer.json for what its model does not know, "
                f"expected {names['unknown']!r}, its unk_token; name one of them in both, also in tokenizer_config.json"
            )
        if model.get("dropout"):
            raise UserError(
                f"{folder or 'tokenizer'}: found dropout {model['dropout']}, by which a text has other tokens each "
                "time, expected null; correct it in tokenizer.json"
            )
        self._splitter = WordSplitter(backend)
        stand_around_texts(backend, names)  # its rules may give up on any text: here that is an error that names them
        self.word_table_reason = self._why_no_word_table()
        self._forget_words()

    def _check_ids(self, vocabulary: dict[str, int]) -> None:
        """Raise UserError for an id far above the number of tokens, or one of two tokens."""
        token, highest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
        if highest > len(vocabulary) + _MOST_UNUSED_IDS:
            raise UserError(
                f"{self.folder or 'tokenizer'}: found id {highest} of {token!r} among {len(vocabulary)} tokens, "
                f"expected at most {_MOST_UNUSED_IDS} ids without a token; correct it in tokenizer.json"
            )
        by_id = {number: token for token, number in vocabulary.items()}
        if len(by_id) < len(vocabulary):
            token, number = next(item for item in vocabulary.items() if by_id[item[1]] != item[0])
            raise UserError(
                f"{self.folder or 'tokenizer'}: found id {number} of both {token!r} and {by_id[number]!r}, expected an "
                "id of its own for each token; correct it in tokenizer.json"
            )

    def _check_names(self) -> None:
        """Raise UserError for a special token that would break vocab.txt, or that ordinary text is encoded to, and for
        a mask that is another role's token too (padding may be the separator, as EuroBERT's is).
        """
        if (shared := [role for role, name in self.names.items() if name == self.names["mask"]]) != ["mask"]:
            raise UserError(
                f"{self.folder or 'tokenizer'}: found {self.names['mask']!r} as the {' and the '.join(shared)} token, "
                "expected a mask of its own, such as [MASK]; name it in tokenizer_config.json (mask_token)"
            )
        for role, name in self.names.items():
            where = f"{self.folder or 'tokenizer'}: found {name[:60]!r} as the {role} token"
            if len(name) > _LONGEST_NAME:
                raise UserError(f"{where}, of {len(name):,} letters, expected at most {_LONGEST_NAME}; correct it")
            if name.splitlines() != [name]:
                raise UserError(f"{where}, expected a name without line breaks: vocab.txt has one token a line")
            if role != "unknown" and is_word(name) and self._comes_of_text(name):
                raise UserError(
                    f"{where}, an ordinary word: wherever a text has it, it would be lost; expected a name with marks "
                    f"around it, such as [{name.upper()}], in tokenizer_config.json and the vocabulary"
                )

    def _comes_of_text(self, name: str) -> bool:
        try:
            ids = self.backend.encode(name, add_special_tokens=False).ids
        except Exception:  # a bare one: the model knows neither the word nor a token for what it doesn't know
            return False
        return self.backend.token_to_id(name) in ids

    # ---- reading and writing ----

    @classmethod
    def from_folder(cls, path: str | Place) -> "Tokenizer":
        """Read a tokenizer's folder, a tokenizer.json, or a vocab.txt (WordPiece); also a store's.

        Raises:
            UserError: the folder holds no tokenizer that can be read.
        """
        path = to_place(path)
        if isinstance(path, StorePath):
            copy = _copy_of(path)
            try:
                return cls.from_folder(copy)
            except UserError as error:  # whose reader knows nothing of the copy
                here, there = (copy, path) if copy.is_dir() else (copy.parent, path.parent)
                raise UserError(str(error).replace(str(here), str(there))) from error
        folder = path if path.is_dir() else path.parent
        if path.is_dir():
            found = [path / name for name in _READ if os.path.lexists(path / name)]
            if found and not found[0].is_file():  # as a link to a file that is gone: the next one may have other words
                raise UserError(f"{found[0]}: found no regular file, expected one of a tokenizer; restore it")
        else:
            found = [path] if path.is_file() else []
        if not found and path.is_dir():
            raise UserError(
                f"{path}: found no tokenizer.json and no vocab.txt, expected a tokenizer; `cloze vocab` makes a new "
                "one, and transformers writes a model's: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
            )
        if not found:
            raise UserError(
                f"tokenizer: found no {path}, expected a folder with tokenizer.json or vocab.txt, or such a file; "
                "`cloze vocab` makes one"
            )
        config = read_tokenizer_config(folder)
        try:
            with readable_panics(lambda: folder):
                read = from_tokenizer_json if found[0].suffix == ".json" else from_vocab_txt
                backend = read(found[0], config)
        except UserError:
            raise
        except Exception as error:  # the library raises plain Exceptions, which quote what they found
            what = " ".join(str(error).split())[:_MOST_SAID]
            raise UserError(f"{found[0]}: can't be read as a tokenizer: {what}") from error
        with readable_panics(lambda: folder):
            backend = with_listed_tokens(backend, folder, config)
            names = special_names(backend.get_vocab(), config, byte_level(backend))
        return cls(backend, names, folder, config.get("split_special_tokens") is True)

    def fault_in(self, manifest: Manifest) -> str | None:
        """One line if this isn't the tokenizer that made a manifest's shards, else None. Ids of the shards are names in
        it, and rows of a model.
        """
        for what, found, expected in (
            ("a tokenizer with fingerprint", self.fingerprint[:12], manifest.tokenizer_fingerprint[:12]),
            ("special tokens", self.special_tokens, manifest.special_tokens),
            ("a tokenizer of size", self.vocab_size, manifest.vocab_size),
        ):
            if found != expected:
                return (
                    f"{manifest.folder / 'tokenizer'}: found {what} {found}, expected {expected}, as the manifest says"
                )
        return None

    def save(
        self, folder: str | Place, config: bytes | None = None, check: Callable[[], object] = lambda: None
    ) -> dict[str, str]:
        """Write tokenizer.json, tokenizer_config.json and vocab.txt; `AutoTokenizer.from_pretrained` loads it.

        Args:
            config: content of tokenizer_config.json; None: what transformers needs to know.
            check: called before each file gets its name.

        Returns:
            The SHA-256 of each file by its name.
        """
        contents = self.contents(config)
        for name, content in contents.items():
            with publishing(to_place(folder) / name) as aside:
                aside.write_bytes(content)
                check()
        return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def gives_token_types(self, *, as_saved: bool) -> bool:
        """Whether transformers, reading its folder, gives a model the numbers of the texts of a pair.

        Args:
            as_saved: by the version that has saved the model, with which it was trained; else by any version.
        """
        if not isinstance(self.folder, Path):
            return True
        config, model = (fields_if_readable(self.folder / name) for name in ("tokenizer_config.json", "config.json"))
        if isinstance(given := config.get("model_input_names"), list):
            return "token_type_ids" in given
        usual = "AlbertTokenizer" if model.get("model_type") == "albert" else "BertTokenizer"
        named = named_class(self.folder, config) or usual
        named, version = named.removesuffix("Fast"), re.match("[0-9]{1,18}", str(model.get("transformers_version")))
        if as_saved and (named in _CLASSES_WITH_TYPES_IN_4 or named == _BASE_WITH_TYPES_IN_4 and version):
            return version is None or int(version[0]) <= 4  # versions before 4.1 did not name themselves
        return named in _CLASSES_WITH_TYPES

    def contents(self, config: bytes | None = None) -> dict[str, bytes]:
        """The files that `save` writes, by name, in its order."""
        if config is None:
            config = _in_json(
                {
                    "tokenizer_class": _TOKENIZER_CLASS,
                    "do_lower_case": self.lowercase,
                    "model_max_length": 1_000_000,
                    "clean_up_tokenization_spaces": False,
                    "model_input_names": _MODEL_INPUT_NAMES,
                    **{HUGGING_FACE_NAMES[role]: name for role, name in self.names.items()},
                }
            )
        # A copy, so that this one stays as it was read; for other libraries it finds special tokens in texts.
        written = self.as_given()
        if not stand_around_texts(self.backend, self.names):
            put_around_texts(written, self.names)
        # The configuration first: a kill then leaves no tokenizer whose special tokens and rules would be guessed.
        return {
            "tokenizer_config.json": config,
            "tokenizer.json": written.to_str(pretty=True).encode(),
            "vocab.txt": self.vocab_txt().encode(),
        }

    def vocab_txt(self) -> str:
        """The tokens, one per line, by id."""
        by_id = sorted(self.backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return "".join(f"{token}\n" for token, _ in by_id)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids: vocabulary, model, normaliser, pre-tokenizer, roles."""
        content = content_of(self.as_given())
        kept = {name: content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
        kept |= {"special_tokens": self.names} | ({"split_special_tokens": True} if self._split_special else {})
        text = json.dumps(kept, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def as_given(self) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer, for which all special tokens are special."""
        return with_special(self.backend, self._marks, True)

    # ---- facts ----

    @property
    def word_table(self) -> bool:
        return not self.word_table_reason

    @cached_property
    def lowercase(self) -> bool:
        """Whether it lowercases text."""
        return self.normalize("A") == "a"

    @cached_property
    def space_begins_word(self) -> bool:
        """Whether tokens include the space before a word: `Ġyork` in byte-level BPE, `▁york` in SentencePiece."""
        return space_begins_word(self.backend)

    @cached_property
    def first_word_differs(self) -> bool:
        """Whether a word at the beginning of a text has other tokens than after a space, as in RoBERTa."""
        return self.space_begins_word and not adds_space(self.backend)

    @cached_property
    def continues_word(self) -> np.ndarray:
        model, of_bytes = model_of(self.backend), byte_level(self.backend)
        continues = np.zeros(self.vocab_size, bool)
        for token, number in self.backend.get_vocab(with_added_tokens=True).items():
            if model["type"] == "WordPiece":
                continues[number] = token.startswith(model["continuing_subword_prefix"])
            elif model["type"] in ("BPE", "Unigram"):
                continues[number] = not begins_word(token, of_bytes)
        continues[self.special_tokens.ids] = False
        return continues

    @cached_property
    def tokens(self) -> list[str]:
        """Tokens by id; an id without a token is an empty string."""
        tokens = [""] * self.vocab_size
        for token, number in self.backend.get_vocab(with_added_tokens=True).items():
            tokens[number] = token
        return tokens

    @_with_readable_panics
    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=False)

    # ---- encoding ----

    @cached_property
    def _growth(self) -> Growth:
        return Growth(self.backend)

    @_with_readable_panics
    def normalize(self, text: str) -> str:
        """A text after the tokenizer's normalisation, such as lower case."""
        normalizer = self.backend.normalizer
        self._growth.check([text])
        return text if normalizer is None else normalizer.normalize_str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    @_with_readable_panics
    def encode_with_offsets(self, texts: list[str]) -> list[LocatedTokens]:
        """Ids of each text, with their places in it."""
        self._growth.check(texts)
        encoded = self.backend.encode_batch(texts, add_special_tokens=False)
        return [
            LocatedTokens(
                self._as_text[np.array(each.ids, np.int64)].tolist(),
                _trimmed(text, each.offsets),
                self._continues(each),
            )
            for text, each in zip(texts, encoded, strict=True)
        ]

    def _continues(self, encoded: tokenizers.Encoding) -> list[bool]:
        """Whether each token goes on with the word of the one before; by the tokens if the rules cut no words."""
        if self._cuts_words:
            return [word == before for before, word in itertools.pairwise([None, *encoded.word_ids])]
        return [number > 0 and bool(self.continues_word[token]) for number, token in enumerate(encoded.ids)]

    @cached_property
    def _cuts_words(self) -> bool:
        """Whether the normaliser and pre-tokenizer divide words; Gemma's and Llama 2's models get a text whole."""
        return len(parts(self.backend, "a a")) > 1

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of texts, flat (T,), and offsets (N+1,) int64; the same ids as the plain tokenizer's."""
        if not self.word_table:
            return self.encode_plainly(texts)
        pieces = [text.encode() for text in texts]
        # The separator is white space for the tokenizer (a condition of word_table), so no word crosses it.
        bounds = ragged.to_offsets(np.array([len(piece) + 1 for piece in pieces], np.int64))
        return self.encode_bytes(b"\n".join(pieces) + b"\n", bounds)

    @_with_readable_panics
    def encode_plainly(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_batch`, with `tokenizers` only: the reference, and used for models without a table of words."""
        self._growth.check(texts)
        encoded = [item.ids for item in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        offsets = ragged.to_offsets(np.array([len(ids) for ids in encoded], np.int64))
        flat = np.fromiter(itertools.chain.from_iterable(encoded), np.int64, count=int(offsets[-1]))
        return self._as_text[flat], offsets

    @_with_readable_panics
    def encode_bytes(self, data: bytes, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids of UTF-8 text divided at `bounds` (N+1,), byte positions between characters; flat ids and offsets.

        Words end at bounds: a sentence may begin after a page break, which the tokenizer keeps in the word, or after a
        。 that it doesn't isolate.
        """
        if not self.word_table:
            return self.encode_plainly(_sentences(data, bounds.tolist(), self.first_word_differs))
        keys, word, starts = self._splitter.distinct(data, bounds[:-1])
        rows = self._rows(keys)
        lengths = self._lengths[rows]
        offsets = ragged.to_offsets(lengths[word])
        ids = np.empty(offsets[-1], self.dtype)
        # First the first token of every word, then the second tokens, and so on: most words have one.
        longest = int(lengths.max(initial=0))
        padded = np.append(self._flat, np.zeros(longest, self.dtype))
        empty = lengths == 0
        place = offsets[:-1]
        if empty.any():
            kept = np.flatnonzero(~empty[word])
            word, place = word[kept], place[kept]
        for number in range(longest):
            ids[place + number] = padded[self._starts[rows] + number][word]
            more = np.flatnonzero((lengths > number + 1)[word])
            word, place = word[more], place[more]
        return ids, offsets[np.searchsorted(starts, bounds)]

    def _rows(self, keys: list[int | str]) -> np.ndarray:
        """Rows of words in the table; new words are encoded and added."""
        if len(self._words) + len(keys) > _TABLE_WORDS or self._letters > _TABLE_LETTERS:
            self._forget_words()
        known = self._words
        rows = np.fromiter(map(known.get, keys, itertools.repeat(-1)), np.int64, count=len(keys))
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            new = [keys[place] for place in missing.tolist()]
            rows[missing] = np.arange(len(known), len(known) + len(new))
            known.update(zip(new, rows[missing].tolist(), strict=True))
            flat, offsets = self._encode_words([word_of(key) for key in new])
            self._letters += sum(len(key) for key in new if isinstance(key, str))
            self._starts = np.concatenate((self._starts, offsets[:-1] + len(self._flat)))
            self._lengths = np.concatenate((self._lengths, np.diff(offsets)))
            self._flat = np.concatenate((self._flat, flat))
        return rows

    def _encode_words(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of words, flat, and offsets."""
        model = self.backend.model
        ids, ends = [], [0]  # flat: one list per word would slow down Python's garbage collector
        for word in words:
            ids += self._word_ids(word, model)
            ends.append(len(ids))
        return self._as_text[np.array(ids, np.int64)], np.array(ends, np.int64)

    def _word_ids(self, word: str, model: tokenizers.models.Model) -> list[int]:
        """Ids of one word. Normalisation changes at most the case of printable ASCII, so such words are encoded by the
        model directly, in a fifth of the time of encoding a text.
        """
        if not (word.isascii() and word.isprintable()):
            return self.backend.encode(word, add_special_tokens=False).ids
        if self.lowercase:
            word = word.lower()
        word = self._splitter.prefix + word
        if self._whole_words is not None:
            return [self._whole_words.get(word, self.special_tokens.unknown)]
        return [piece.id for piece in model.tokenize(word)]

    def _forget_words(self) -> None:
        self._words: dict[int | str, int] = {}
        self._letters = 0
        self._starts, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        self._flat = np.empty(0, self.dtype)

    def _why_no_word_table(self) -> str:
        content = content_of(self.backend)
        if content["model"]["type"] not in _WORD_MODELS and not self._splitter.prefix:
            return f"model {content['model']['type']}"
        if any(not token["special"] for token in content["added_tokens"]):
            return "added tokens that texts may have"
        return self._splitter.reason


def _trimmed(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    trimmed = []
    for low, high in offsets:
        piece = text[low:high]
        start = high - len(piece.lstrip())
        trimmed.append((start, start + len(piece.strip())))
    return trimmed


def _sentences(data: bytes, bounds: list[int], spaces: bool) -> list[str]:
    """The pieces of a text without surrounding white space.

    Args:
        spaces: keep a space before a sentence inside a paragraph, where its first word is another token after one.
    """
    texts = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        text = data[low:high].decode().strip()
        texts.append(f" {text}" if spaces and text and low and data[low - 1] == 0x20 else text)
    return texts


def _copy_of(path: StorePath) -> Path:
    """The local path of a copy of a tokenizer's files, as far as they exist."""
    alone = path.name.endswith((".json", ".txt"))
    folder = fetched(path.parent if alone else path, (*FETCHED, path.name) if alone else FETCHED)
    return folder / path.name if alone else folder


def copy_tokenizer(source: Tokenizer, folder: Place, check: Callable[[], object] = lambda: None) -> dict[str, str]:
    """Copy a tokenizer into a prepared folder with its configuration, as `described_in_copy` has it.

    Args:
        check: called before each file gets its name.

    Returns:
        The SHA-256 of each file by its name.
    """
    return source.save(folder, described_in_copy(source), check)


def described_in_copy(source: Tokenizer) -> bytes | None:
    """The tokenizer_config.json of a copy: the tokenizer's own, except the tokenizer class if its post-processing
    differs from the form of samples: the class would restore it. None: what `save` writes without one.
    """
    changed = (
        {}
        if stand_around_texts(source.backend, source.names)
        else {"tokenizer_class": _TOKENIZER_CLASS, "model_input_names": _MODEL_INPUT_NAMES}
    )
    if source.folder is None or not (path := source.folder / "tokenizer_config.json").is_file():
        return None
    with naming(path):
        described = path.read_bytes()
    config = load_json(described)
    names = special_names(source.backend.get_vocab(), config, byte_level(source.backend))
    changed |= rules_to_describe(source.backend, config)
    # Names from special_tokens_map.json, which isn't copied.
    changed |= {HUGGING_FACE_NAMES[role]: name for role, name in source.names.items() if names[role] != name}
    return _in_json(config | changed) if changed else described


def _in_json(config: Fields) -> bytes:
    """The content of a tokenizer_config.json."""
    return (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode()
