"""`prepare` with the tokenizers that released encoders have: their own ids, whole words, spans."""

import itertools
import unicodedata

import numpy as np
import pytest
import tokenizers

from cloze.pipeline.config import MaskingConfig, SamplesConfig, SourceConfig, SplitConfig
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization import words
from tests.pipeline import corpus
from tests.pipeline.families import KINDS, LINES, family

UNSPACED = ("THAI", "CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH")


def begins(line: str, tokens: list[str], byte_level: bool) -> list[bool]:
    """Which tokens begin a word: after white space, in a script without spaces, and around the unknown token."""
    if any(token.startswith("##") for token in tokens):
        found = [not token.startswith("##") for token in tokens]
    elif byte_level:  # the tokens' characters are the line's bytes
        at = dict(zip(np.cumsum([0, *(len(character.encode()) for character in line)]).tolist(), line, strict=False))
        places = np.cumsum([0, *map(len, tokens)]).tolist()
        found = [
            # Of a character's first byte alone the script is open; of two bytes it is known, not that it is a mark.
            place == 0 or (token != "à" and _starts(at.get(place, "a"), marks=len(token) < 3))
            for place, token in zip(places, tokens, strict=False)
        ]
    else:
        found = [_starts(token[0].replace("▁", " ")) for token in tokens]
    unknown = [token == corpus.NAMES["unknown"] for token in tokens]
    return (np.array(found) | unknown | np.roll(unknown, 1)).tolist()


def _starts(character: str, marks: bool = False) -> bool:
    unspaced = unicodedata.name(character, "").startswith((*UNSPACED, "COMBINING KATAKANA"))
    return character == " " or (unspaced and (marks or unicodedata.category(character)[0] != "M"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys_and_masks_are_of_words(tmp_path, kind):
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(LINES[n % 8].split(), 9)) for n in range(160)] + LINES
    (tmp_path / "in").write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
    family(kind).save(tmp_path / "tokenizer")
    bare = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    expected = {}
    for line in lines:
        encoding = bare.encode(line, add_special_tokens=False)
        expected[tuple(encoding.ids)] = begins(line, encoding.tokens, kind.startswith("byte-level"))
    for strategy in ("whole_word", "span"):
        manifest = prepare(
            corpus.config(
                tmp_path,
                [tmp_path / "in"],
                output=str(tmp_path / strategy),
                max_length=512,
                mask_sets=2,
                source=SourceConfig(format="lines"),
                samples=SamplesConfig(objective="single_sentences"),
                split=SplitConfig(validation=0, test=0),
                masking=MaskingConfig(strategy=strategy),
            )
        )
        reader = ShardReader(manifest.folder)
        samples, masks = reader.take(np.arange(reader.num_samples), 0)
        seen = set()
        for number, (low, high) in enumerate(itertools.pairwise(samples.offsets.tolist())):
            ids = tuple(samples.input_ids[low + 1 : high - 1].tolist())
            word_of = np.cumsum(expected[ids])  # a KeyError: other ids than the library's
            masked = masks.positions[masks.offsets[number] : masks.offsets[number + 1]].astype(int) - 1
            seen.add(ids)
            # WordPiece has a clause of Thai as one word, which may be too long to be masked
            sizes = np.bincount(word_of[np.array(ids) != manifest.special_tokens.unknown])
            assert len(masked) or sizes[sizes > 0].min(initial=999) > round(0.15 * (len(ids) + 2))
            first = masked[np.diff(masked, prepend=-2) > 1]
            assert np.all((first == 0) | (word_of[first] > word_of[first - 1])), "a run begins inside a word"
            if strategy == "whole_word":
                assert np.isin(word_of, word_of[masked]).sum() == len(masked), "words are masked in part"
        assert seen == set(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_inside_a_text_has_the_ids_that_it_has_there(kind):
    """Where the tokenizer puts a space before a text itself, a sentence must not get a second one."""
    tokenizer = family(kind)
    text = " ".join(LINES[:4])
    data = text.encode()
    cuts = np.cumsum([0, *(len(line.encode()) + 1 for line in LINES[:3]), len(LINES[3].encode())])
    ids, offsets = tokenizer.encode_bytes(data, cuts)
    assert ids.tolist() == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert (np.diff(offsets) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_places_of_words_do_not_need_rules_that_cut_them(kind):
    (located,) = family(kind).encode_with_offsets(["the cats sat"])
    starts = {low for (low, _), goes_on in zip(located.offsets, located.continues, strict=True) if not goes_on}
    assert starts == {0, 4, 9}


def test_of_characters_cut_in_bytes_the_script_counts_and_the_rest_continues():
    """一 is E4 B8 80 and ก is E0 B8 81: E4 alone is Chinese, E0 alone may be Hindi, which has spaces."""
    written = {byte: character for character, byte in words._BYTE_OF.items()}
    cases = {
        b" a": True,
        b"\n": True,
        b"a": False,
        b"\xe4": True,
        b"\xe4\xb8": True,
        b"\xe0\xb8": True,
        b"\xe0": False,
        b"\xe1": False,
    }
    cases |= {b"\xe2": False, b"\xb8\x80": False, "一a".encode(): True, "\u0e48".encode(): False, "é".encode(): False}
    cases |= {"\u3000".encode(): True, "🙂".encode(): False, "𠀀".encode(): True}
    found = {data: words.begins_word("".join(written[byte] for byte in data), True) for data in cases}
    assert found == cases
