"""Predictions for the masked tokens of a few validation samples, shown at each evaluation."""

import torch

from cloze.launch.engine.engine import Engine
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.system.devices import to_device
from cloze.pipeline.loading.batches import evaluation_batches
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_GUESSES = 3
_SHOWN_BLANKS = 8  # masked tokens shown per sample; a long one has dozens


class SamplePredictions:
    """Shows predictions for the first validation samples in TensorBoard's text panel.

    Args:
        count: number of samples shown.
        segments: segment ids of the model.
        metrics: rank 0's MetricsWriter; None elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        reader: ShardReader,
        tokenizer: Tokenizer,
        count: int,
        segments: tuple[int, int],
        metrics: MetricsWriter | None,
    ) -> None:
        self._engine, self._tokenizer, self._metrics = engine, tokenizer, metrics
        # The same batch on every rank: a forward is collective where parameters are partitioned.
        (self._batch,) = evaluation_batches(
            reader, micro_batch_size=count, rank=0, world_size=1, max_samples=count, segments=segments
        )

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Predict the masked tokens and write the page. Collective."""
        self._engine.model.eval()
        inputs = {name: value for name, value in self._batch.items() if name not in ("labels", "next_sentence_label")}
        logits = self._engine(**to_device(inputs, self._engine.device)).prediction_logits
        self._engine.model.train()
        if self._metrics:
            chances, guesses = logits.float().softmax(-1).topk(_GUESSES)
            self._metrics.text("validation/blanks", step, self._page(chances.cpu(), guesses.cpu()))

    def _page(self, chances: torch.Tensor, guesses: torch.Tensor) -> str:
        names = self._tokenizer.tokens
        offsets, positions = self._batch["sequence_offsets"].tolist(), self._batch["masked_positions"].tolist()
        pages = []
        for start, stop in zip(offsets, offsets[1:], strict=False):
            blanks = [index for index, position in enumerate(positions) if start <= position < stop]
            words = [names[token] for token in self._batch["input_ids"][start:stop].tolist()]
            rows = []
            for number, index in enumerate(blanks[:_SHOWN_BLANKS], 1):
                words[positions[index] - start] = f"**({number})**"
                found = ", ".join(
                    f"{_code(names[token])} {chance:.0%}"
                    for token, chance in zip(guesses[index].tolist(), chances[index].tolist(), strict=True)
                )
                rows.append(f"| {number} | {_code(names[self._batch['labels'][index]])} | {found} |")
            text = " ".join(word if word.startswith("**(") else _plain(word) for word in words)
            pages.append("\n".join([text.replace(" ##", ""), "", "| blank | was | guesses |", "|---|---|---|", *rows]))
        return "\n\n---\n\n".join(pages)


def _plain(word: str) -> str:
    """A word with the special characters of Markdown and HTML escaped."""
    return "".join(f"&#{ord(c)};" if c in "*_`|<>[]\\~$" else c for c in word)


def _code(word: str) -> str:
    return "`" + word.replace("`", "'").replace("|", "&#124;") + "`"
