"""Contrastive learning: each anchor is trained to find its own positive among all texts of a global batch.

The loss of one row needs the vectors of all rows, of all ranks and micro-batches. A step therefore has two passes
(GradCache; Gao et al. 2021, arXiv 2101.06983). The first pass computes all vectors without a graph; the loss over the
vectors, gathered from all ranks, gives their gradients. The second pass runs each micro-batch again, with the same
dropout, and backpropagates the gradients of its vectors. The result is the gradient of the whole global batch, however
it is split.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cloze.launch.config import EmbeddingConfig
from cloze.launch.system import distributed
from cloze.launch.training.objective import WholeBatchObjective
from cloze.model.sentence_vectors import SentenceOutput
from cloze.pipeline.fields import MicroBatch


class ContrastiveObjective(WholeBatchObjective):
    """Mean over the global batch's rows of the cross-entropy of each anchor's positive among all texts, summed over the
    sizes of the vectors (`contrastive_losses`).

    Args:
        config: temperature, direction and sizes.
        group_size: number of texts in a row: the anchor, its positive, its hard negatives; a batch has the texts of one
            row after another.
        rank: of this process.
    """

    # Names of the sums of a call, in their order.
    NAMES = ("loss", "correct", "rows")
    STEP_SEED = False  # the model samples nothing

    def __init__(self, config: EmbeddingConfig, group_size: int, rank: int) -> None:
        self._config, self._group_size, self._rank = config, group_size, rank
        # for each micro-batch: the gradients of its vectors, and its sums
        self._next: deque[tuple[Tensor, Tensor]] = deque()

    def counts(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Number of rows on this rank, to be summed over the ranks before the first pass."""
        return [float(sum(len(micro["texts"]) for micro in micro_batches) // self._group_size)]

    def observe(self, outputs: Sequence[SentenceOutput], totals: Tensor) -> None:
        """Compute losses and gradients from the vectors of all micro-batches; every rank has the same number of rows.
        Collective.

        Args:
            outputs: outputs of the first pass, in the order of the micro-batches.
            totals: (1,) float64, number of rows of the global batch.
        """
        sizes = [len(output.vectors) for output in outputs]
        vectors = torch.cat([output.vectors.detach() for output in outputs])
        texts = torch.cat([output.texts for output in outputs if output.texts is not None])  # never None in training
        first = self._rank * sum(sizes)
        everything = distributed.gather(vectors).flatten(0, 1).requires_grad_()
        everyone = distributed.gather(texts).flatten().view(-1, self._group_size)
        own = slice(first // self._group_size, (first + sum(sizes)) // self._group_size)
        groups = everything.unflatten(0, (-1, self._group_size))
        widths = {*self._config.dimensions, groups.shape[-1]}
        by_width = {width: contrastive_losses(groups[..., :width], everyone, own, self._config) for width in widths}
        losses = torch.stack([losses for losses, _ in by_width.values()]).sum(0) / totals.clamp(min=1).float()
        # This rank's rows are candidates of the other ranks' anchors: their gradients are the sum of all ranks'.
        (gradient,) = torch.autograd.grad(losses.sum(), everything)
        gradients = distributed.reduce_sum(gradient)[first : first + sum(sizes)].split(sizes)
        rows = [size // self._group_size for size in sizes]
        hits = by_width[groups.shape[-1]][1]
        self._next = deque(
            (part, torch.stack([share.sum(), hit.sum(), hit.new_tensor(len(hit))]).double())
            for part, share, hit in zip(gradients, losses.detach().split(rows), hits.float().split(rows), strict=True)
        )

    def __call__(self, output: SentenceOutput, micro_batch: MicroBatch, totals: Tensor) -> tuple[Tensor, Tensor]:
        """A scalar whose gradient is that of the global loss for the next micro-batch; and its sums, float64 (3,).

        Args:
            output: output of the second pass, in the order of the first.
        """
        gradient, sums = self._next.popleft()
        return (output.vectors * gradient).sum(), sums

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Share of the anchors whose positive is nearest."""
        return {"accuracy": sums[1] / sums[2]} if sums[2] else {}


def contrastive_losses(groups: Tensor, texts: Tensor, own: slice, config: EmbeddingConfig) -> tuple[Tensor, Tensor]:
    """Losses of some rows of a global batch (n,) fp32, and whether the positive has the largest cosine (n,) bool.

    -log softmax over the cosines of an anchor with the positives and hard negatives of all rows, over the temperature:
    the multiple negatives ranking loss of sentence-transformers (scale = 1 / temperature). Symmetric: the mean with the
    loss of a positive over the anchors of all rows.

    Args:
        groups: (N, texts of a row, size): vectors of all rows: anchor, positive, hard negatives.
        texts: (N, texts of a row) int64, the same number for equal texts.
        own: the rows whose losses are computed.
    """
    groups = functional.normalize(groups, dim=-1)
    candidates, names = groups[:, 1:].transpose(0, 1).flatten(0, 1), texts[:, 1:].T.flatten()
    right = torch.arange(own.start, own.stop, device=groups.device)
    scores = groups[own, 0] @ candidates.T
    if not config.same_text_negatives:
        scores = _without_same_texts(scores, names, texts[own], right)
    losses = functional.cross_entropy(scores / config.temperature, right, reduction="none")
    if config.symmetric:
        back = groups[own, 1] @ groups[:, 0].T
        if not config.same_text_negatives:
            back = _without_same_texts(back, texts[:, 0], texts[own], right)
        losses = (losses + functional.cross_entropy(back / config.temperature, right, reduction="none")) / 2
    return losses, scores.detach().argmax(1) == right


def _without_same_texts(scores: Tensor, names: Tensor, texts: Tensor, right: Tensor) -> Tensor:
    """Scores (n, candidates) with -inf for candidates other than the right one that have the text of the row's anchor
    or positive; texts (n, texts of a row).
    """
    same = (names == texts[:, :1]) | (names == texts[:, 1:2])
    return scores.masked_fill(same.scatter(1, right[:, None], False), -torch.inf)
