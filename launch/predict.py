"""`cloze predict`: a trained model put to use, from the shell and from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from launch import runs
from launch.config import FillMaskConfig
from launch.console import Console
from launch.environment import device_type, prepare_deepspeed, read_environment
from model.bert import BertForPreTraining
from model.hub import load_pretrained
from pipeline.errors import UserError
from pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class Guess:
    """A word for a blank, with its probability."""

    token: str
    probability: float


class Predictor:
    """A model and its tokenizer, ready for use.

    >>> Predictor.from_folder("runs/small-hf").fill_mask("The capital of [MASK] is Paris.")
    """

    def __init__(self, model: BertForPreTraining, tokenizer: Tokenizer) -> None:
        self.device = torch.device(device_type())
        self.model = model.to(self.device).eval()
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> Predictor:
        """From a Hugging Face folder of a BERT, or a Cloze run (its newest good checkpoint).

        Raises:
            UserError, ModelError: the folder holds neither, or something in it is damaged.
        """
        folder = Path(folder)
        if (folder / runs.CONFIG).exists():
            prepare_deepspeed(read_environment())
            from launch.checkpoint import read_weights

            config = runs.model_config(folder)
            weights, tokenizer_folder = read_weights(folder)[1], folder / runs.TOKENIZER
        else:
            config, weights = load_pretrained(folder)
            tokenizer_folder = folder
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(f"{folder}: found a tokenizer of {tokenizer.vocab_size} tokens, expected at most "
                            f"{config.vocab_size}, the model's vocab_size; take the tokenizer it was trained with")
        model = BertForPreTraining(config)
        model.load_state_dict(weights)
        return cls(model, tokenizer)

    @torch.inference_mode()
    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Guess]]:
        """The `top_k` most probable tokens for each [MASK] of a text, most probable first.

        Raises:
            UserError: there is no [MASK], or the text is longer than the model's positions.
        """
        if top_k > self.model.config.vocab_size:
            raise UserError(f"top_k: found {top_k}, expected at most {self.model.config.vocab_size}, the vocabulary")
        ids, blanks = self._encode_with_blanks(text)
        output = self.model(
            torch.tensor(ids, device=self.device), sequence_offsets=torch.tensor([0, len(ids)], dtype=torch.int32,
                                                                                 device=self.device),
            max_sequence_length=len(ids), masked_positions=torch.tensor(blanks, device=self.device),
        )  # fmt: skip
        best = output.prediction_logits.float().softmax(-1).topk(top_k)
        return [
            [Guess(self.tokenizer.decode([token]), probability)
             for token, probability in zip(tokens, probabilities, strict=True)]
            for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _encode_with_blanks(self, text: str) -> tuple[list[int], list[int]]:
        """Ids with the special tokens around them, and the positions of the blanks.

        A literal [MASK] in a text is text to the tokenizer, so the pieces between the blanks are encoded apart.
        """
        special = self.tokenizer.special_tokens
        pieces = text.split("[MASK]")
        if len(pieces) == 1:
            raise UserError(f"text: found no [MASK] in {text!r}, expected at least one blank to fill")
        ids, blanks = [special.classification], []
        for number, piece in enumerate(pieces):
            if number:
                blanks.append(len(ids))
                ids.append(special.mask)
            ids += self.tokenizer.encode(piece)
        ids.append(special.separator)
        longest = self.model.config.max_position_embeddings
        if len(ids) > longest:
            raise UserError(f"text: found {len(ids)} tokens, expected at most {longest}, the model's positions; "
                            "shorten the text")
        return ids, blanks


def fill_mask(config: FillMaskConfig) -> int:
    """Print the guesses for every blank of every text; returns the exit status."""
    predictor, console = Predictor.from_folder(config.model), Console()
    for text in config.text:
        console.say(text)
        for number, guesses in enumerate(predictor.fill_mask(text, config.top_k), 1):
            line = "  ".join(f"{guess.token} {guess.probability:.3f}" for guess in guesses)
            console.say(f"  {number}: {line}")
    return 0
