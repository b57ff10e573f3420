"""`init_from` with another vocabulary than the source's: rows of tokens that both have are taken, others are made.

A new token's row is the mean of the rows of the old tokens that it replaces (`mean`: Gee et al., EMNLP 2022, Fast
Vocabulary Transfer), the mean of all old rows (`mean_all`: Hewitt 2021), or drawn like those of a new model (`random`).
The bias of the output is made in the same way.
"""

import json
from dataclasses import dataclass

import torch

from cloze.pipeline.errors import UserError
from cloze.pipeline.records import ROLES
from cloze.pipeline.tokenization.backends import byte_level
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.tokenization.words import bytes_of

# Ends of the names of weights with a row for each token.
OF_TOKENS = ("embeddings.word.weight", "masked_lm.decoder.weight", "masked_lm.decoder.bias")


@dataclass(frozen=True)
class NewVocabulary:
    """How the rows of a new vocabulary follow from those of an old one.

    taken: ids of tokens that both have, new -> old. pieces: the other tokens, new id -> old ids that it replaces.

    Args:
        start: how the other rows start: mean (also of a transplant), mean_all or random.
        old_size: tokens of the old vocabulary.
    """

    taken: dict[int, int]
    pieces: dict[int, list[int]]
    start: str
    old_size: int

    def rows(self, old: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """The rows of a weight for the new vocabulary.

        Args:
            old: the weight of the source, a row for each token of the old vocabulary, and maybe further ones.
            drawn: the weight of the new model with its initial values, which rows without a source keep.
        """
        rows = drawn.detach().float().clone()
        rows[list(self.taken)] = old[list(self.taken.values())].float()
        if self.pieces and self.start == "mean_all":
            rows[list(self.pieces)] = old[: self.old_size].float().mean(0)
        elif self.pieces and self.start != "random":
            flat = torch.tensor([piece for pieces in self.pieces.values() for piece in pieces])
            sizes = torch.tensor([len(pieces) for pieces in self.pieces.values()])
            owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            sums = torch.zeros((len(sizes), *old.shape[1:])).index_add_(0, owner, old[flat].float())
            rows[list(self.pieces)] = sums / sizes.view(-1, *[1] * (old.ndim - 1))
        return rows

    def __str__(self) -> str:
        how = {"mean_all": "the mean of all rows", "random": "drawn"}.get(self.start, "the mean of their pieces' rows")
        return f"{len(self.taken):,} rows taken, {len(self.pieces):,} of new tokens: {how}"


def is_extension(old: Tokenizer, new: Tokenizer) -> bool:
    """Whether the new tokenizer has all tokens of the old one under their ids, and cuts words by the same rules."""
    before, after = (json.loads(each.backend.to_str()) for each in (old, new))
    if any(before[name] != after[name] for name in ("normalizer", "pre_tokenizer")):
        return False
    return (
        before["model"]["type"] == after["model"]["type"]
        and old.names == new.names
        and new.tokens[: old.vocab_size] == old.tokens
    )


def new_vocabulary(old: Tokenizer, new: Tokenizer, start: str) -> NewVocabulary:
    """How the rows of the new tokenizer's tokens follow from those of the old one.

    Args:
        start: mean, mean_all or random, for an extension of the old tokenizer; transplant: for any tokenizer.

    Raises:
        UserError: the new tokenizer is no extension of the old one, and no transplant was asked for.
    """
    cutter = _Cutter(old)
    if start != "transplant":
        if not is_extension(old, new):
            raise UserError(
                f"init_from: found a tokenizer with fingerprint {old.fingerprint[:12]} in {old.folder}, expected that "
                f"of the shards, {new.fingerprint[:12]}, or one that theirs extends (cloze vocab --extend); "
                f"prepare them with --tokenizer {old.folder}, or take over what both have by "
                "--init_vocabulary transplant"
            )
        same = {number: number for number in range(old.vocab_size)}
        cut = {number: cutter.token(new.tokens[number]) for number in range(old.vocab_size, new.vocab_size)}
        return NewVocabulary(same, {number: ids for number, ids in cut.items() if ids}, start, old.vocab_size)
    # One token may have several roles: the later ones count, a separator's before padding's.
    taken = {getattr(new.special_tokens, role): getattr(old.special_tokens, role) for role in ROLES}
    pieces: dict[int, list[int]] = {}
    known = {text: number for number, text in enumerate(_texts(old)) if number not in old.special_tokens.ids}
    both_of_bytes = byte_level(old.backend) and byte_level(new.backend)
    for number, text in enumerate(_texts(new)):
        if number in taken or not text:
            continue
        if text in known:
            taken[number] = known[text]
            continue
        if _is_text(text):
            parts = cutter.text(text) if text.strip() else []
        else:  # bytes that are a part of a character
            parts = cutter.token(new.tokens[number]) if both_of_bytes else []
        if parts:
            pieces[number] = parts
    return NewVocabulary(taken, pieces, start, old.vocab_size)


def _is_text(text: str) -> bool:
    """Whether a text of `_texts` has whole characters only."""
    return not any("\udc80" <= character <= "\udcff" for character in text)


def _texts(tokenizer: Tokenizer) -> list[str]:
    """The texts of tokens by id, with a space before those that begin a word. Each byte that is no part
    of a whole character becomes a lone surrogate of its own.
    """
    kind, of_bytes = json.loads(tokenizer.backend.to_str())["model"], byte_level(tokenizer.backend)
    inside = kind.get("continuing_subword_prefix") or ""
    texts = []
    for token in tokenizer.tokens:
        if of_bytes:
            texts.append(bytes_of(token).decode(errors="surrogateescape"))
        elif kind["type"] in ("WordPiece", "WordLevel"):
            goes_on = bool(inside) and token.startswith(inside)
            texts.append(token.removeprefix(inside) if goes_on else f" {token}" if token else "")
        else:
            texts.append(token.replace("▁", " "))
    return texts


class _Cutter:
    """Cuts tokens and texts into ids of the old tokenizer; no ids if it does not know a part of one."""

    def __init__(self, old: Tokenizer) -> None:
        self.old = old
        model = json.loads(old.backend.to_str())["model"]
        self._inside = model["continuing_subword_prefix"] if model["type"] == "WordPiece" else ""
        self._vocabulary = model["vocab"] if self._inside else {}

    def token(self, token: str) -> list[int]:
        """Ids of a token that is written as the old model writes its own."""
        if self._inside and token.startswith(self._inside):
            return self._inside_word(token.removeprefix(self._inside))
        return self._known([piece.id for piece in self.old.backend.model.tokenize(token)])

    def text(self, text: str) -> list[int]:
        """Ids of a token's text, with a space before it if it begins a word."""
        if self._inside and not text.startswith(" "):
            return self._inside_word(self.old.normalize(text).strip())
        return self._known(self.old.encode(text if self.old.first_word_differs else text.strip()))

    def _inside_word(self, text: str) -> list[int]:
        """Ids of the rest of a word, the longest piece first, as WordPiece cuts it: its model cuts whole words only."""
        ids: list[int] = []
        while text:
            sizes = range(len(text), 0, -1)
            size = next((size for size in sizes if self._inside + text[:size] in self._vocabulary), 0)
            if not size:
                return []
            ids.append(self._vocabulary[self._inside + text[:size]])
            text = text[size:]
        return ids

    def _known(self, ids: list[int]) -> list[int]:
        return [] if self.old.special_tokens.unknown in ids else ids
