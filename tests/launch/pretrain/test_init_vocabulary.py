"""Rows of a new vocabulary: old ones to the bit, new ones from what they replace, by a plain loop over the weights."""

import pytest
import tokenizers
import torch
from tokenizers import models

from cloze.launch.pretrain.init_vocabulary import is_extension, new_vocabulary
from cloze.pipeline.config import PrepareConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.vocabulary import extend_vocabulary
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import EURO_NAMES, byte_tokenizer
from tests.pipeline import corpus
from tests.pipeline.families import LINES, family


def extended(folder, kind):
    family(kind).save(folder / "old")
    (folder / "in.txt").write_text("\n\n".join(["Transformers tokenize books about tokenizers."] * 3 + LINES), "utf-8")
    given = PrepareConfig(
        [str(folder / "in.txt")], str(folder / "new"), extend=str(folder / "old"), vocabulary=VocabularyConfig(add=25)
    )
    return Tokenizer.from_folder(folder / "old"), extend_vocabulary(given)


@pytest.mark.parametrize("kind", ["Unigram", "byte-level BPE, Llama 3's cuts", "Chinese WordPiece"])
def test_new_rows_are_means_of_the_pieces_and_old_rows_stay(tmp_path, kind):
    old, extension = extended(tmp_path, kind)
    new = extension.tokenizer
    assert is_extension(old, new) and not is_extension(new, old)
    table, drawn = torch.randn(old.vocab_size + 7, 4), torch.randn(new.vocab_size + 3, 4)
    rows = new_vocabulary(old, new, "mean").rows(table, drawn)
    assert torch.equal(rows[: old.vocab_size], table[: old.vocab_size])
    assert torch.equal(rows[new.vocab_size :], drawn[new.vocab_size :])
    for each in extension.added:
        expected = table[[old.tokens.index(piece) for piece in old_pieces(old, each.token)]].mean(0)
        assert torch.allclose(rows[new.tokens.index(each.token)], expected, atol=1e-6), each
    bias = new_vocabulary(old, new, "mean").rows(table[:, 0], drawn[:, 0])
    assert torch.allclose(bias, rows[:, 0], atol=1e-6)
    further = slice(old.vocab_size, new.vocab_size)
    every = new_vocabulary(old, new, "mean_all").rows(table, drawn)
    assert torch.allclose(every[further], table[: old.vocab_size].mean(0).expand(len(extension.added), -1))
    assert torch.equal(new_vocabulary(old, new, "random").rows(table, drawn)[further], drawn[further])


def old_pieces(old: Tokenizer, token: str) -> list[str]:
    """A piece inside a word is cut as behind a letter that stays alone."""
    if not token.startswith("##"):
        return [piece.value for piece in old.backend.model.tokenize(token)]
    return [piece.value for piece in old.backend.model.tokenize(f"🙂{token[2:]}")][1:]


def test_a_transplant_takes_what_both_have_and_cuts_the_rest(tmp_path):
    """From Unigram to WordPiece, whose marks of words are others, and whose special tokens have other names, in another
    order.
    """
    old = family("Unigram")
    names = {role: f"<{role}>" for role in corpus.NAMES}
    whole = next(token for token in old.tokens if token.startswith("▁") and token[1:].isascii() and len(token) > 3)
    listed = ["cats", "##e", whole[1:], *reversed(names.values()), "\u0b85"]
    backend = tokenizers.Tokenizer(models.WordPiece({name: n for n, name in enumerate(listed)}, unk_token="<unknown>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    new = Tokenizer(backend, names)
    vocabulary = new_vocabulary(old, new, "transplant")
    table, drawn = torch.randn(old.vocab_size, 4), torch.randn(new.vocab_size, 4)
    rows = vocabulary.rows(table, drawn)
    assert torch.equal(rows[2], table[old.tokens.index(whole)]) and torch.equal(rows[1], table[old.tokens.index("e")])
    assert torch.allclose(rows[0], table[old.encode("cats")].mean(0), atol=1e-6)
    for role in names:
        assert torch.equal(rows[getattr(new.special_tokens, role)], table[getattr(old.special_tokens, role)])
    assert torch.equal(rows[-1], drawn[-1])  # the old tokenizer does not know it
    with pytest.raises(UserError, match="init_vocabulary transplant"):
        new_vocabulary(old, new, "mean")
    euro = byte_tokenizer(["the cats"] * 2, names=EURO_NAMES)  # whose separator pads too
    taken = new_vocabulary(old, euro, "transplant").taken
    assert taken[euro.special_tokens.pad] == old.special_tokens.separator
    assert taken[euro.special_tokens.mask] == old.special_tokens.mask


def test_a_transplant_between_byte_level_vocabularies_takes_bytes_and_spaces(tmp_path):
    """Bytes of parts of characters are all no text, and a space alone is one: each has a row of its own."""
    kind = "byte-level BPE"
    old, extension = extended(tmp_path, kind)
    everything = new_vocabulary(old, extension.tokenizer, "transplant")
    assert everything.taken == {number: number for number in range(old.vocab_size)}
    half = old.tokens.index("Ã"), old.tokens.index("©")  # the bytes of é
    table = torch.randn(old.vocab_size, 4)
    rows = everything.rows(table, torch.randn(extension.tokenizer.vocab_size, 4))
    assert torch.equal(rows[list(half)], table[list(half)]) and not torch.equal(rows[half[0]], rows[half[1]])
    pieces = family("Unigram")
    same = new_vocabulary(pieces, pieces, "transplant").taken
    assert same == {number: number for number in range(pieces.vocab_size)}
    assert not set(new_vocabulary(pieces, old, "transplant").pieces) & set(half)  # which are no text for Unigram
