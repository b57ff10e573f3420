"""Minimal pairs, and scores of texts by transformers alone."""

from __future__ import annotations

import json

import torch
import transformers

GOOD = (
    "the man went to the store",
    "a cat sat on the mat .",
    "who ate an apple ?",
    "the sky is blue",
    "milk is good",
    "paris is the capital of france",
    "the man walked to the mat",
    "an apple is blue",
)


BAD = (
    "the man went to store the",
    "a cat sat the on mat .",
    "who an ate apple ?",
    "the sky are blue",
    "milk is good",
    "paris the is capital of france",
    "the man walking to the mat and a cat",
    "a apple is blue",
)


TERMS = {"first": "s-selection", "second": "argument_structure", "third": "binding"}


def write_pairs(folder):
    """Three paradigms of two phenomena. The fifth pair is a tie; some sentences occur twice."""
    folder.mkdir()
    for number, (uid, term) in enumerate(TERMS.items()):
        rows = [
            {"sentence_good": good, "sentence_bad": bad, "UID": uid, "linguistics_term": term}
            for good, bad in zip(GOOD[number:], BAD[number:], strict=True)
        ]
        (folder / f"file-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plain_score(folder, causal: bool = False, shift: int = 0):
    """text -> (pseudo-)log-likelihood, by transformers alone, a token at a time.

    Args:
        causal: nothing is masked, a decoder reads what is before the token.
        shift: how far before the token the vector is by which it is predicted.
    """
    reference = (
        transformers.BertLMHeadModel.from_pretrained(folder, is_decoder=True)
        if causal
        else transformers.AutoModelForMaskedLM.from_pretrained(folder)
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score(text: str, pieces: int | None = None, rest_of_word: bool = False) -> float:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        total = 0.0
        for start in range(0, len(ids), pieces or len(ids)):
            whole = [tokenizer.cls_token_id, *ids[start : start + (pieces or len(ids))], tokenizer.sep_token_id]
            for place in range(1, len(whole) - 1):
                end = place + 1
                while rest_of_word and tokenizer.convert_ids_to_tokens(whole[end]).startswith("##"):
                    end += 1
                hidden = [tokenizer.mask_token_id] * (end - place)
                seen = whole[:place] if causal else [*whole[:place], *hidden, *whole[end:]]
                with torch.no_grad():
                    logits = reference(input_ids=torch.tensor([seen])).logits[0, -1 if causal else place - shift]
                total += float(logits.double().log_softmax(-1)[whole[place]])
        return total

    return score
