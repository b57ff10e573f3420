"""Heads of pretraining: the vocabulary projection with its loss, and next sentence prediction."""

import torch
from torch import Tensor, nn

from cloze.model.amx import extra_rows
from cloze.model.config import BertConfig
from cloze.model.embeddings import compute_dtype, encoder_norm
from cloze.model.encoder import ACTIVATIONS
from cloze.model.inputs import AutogradContext
from cloze.model.weight_copies import Copied

NO_LABEL = -100  # label without a loss, as everywhere in torch

# Number of fp32 scores computed at once in the loss: what fits a CPU's caches (4 MiB), or what fills a GPU.
_CHUNK_ELEMENTS = {False: 1 << 20, True: 1 << 25}


class Pooler(Copied):
    """Dense layer and activation on the first token of each sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.pooler_activation]

    def forward(self, first_tokens: Tensor) -> Tensor:
        """(B, hidden) -> (B, hidden)."""
        return self.activation(self.dense(first_tokens))


class VocabularyProjection(nn.Module):
    """Hidden states to scores of the vocabulary, or directly to losses without keeping the scores.

    Rows beyond `vocab_size` pad the matrices; they are excluded from scores, softmax and loss.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.weight = nn.Parameter(torch.zeros(config.padded_vocab_size, config.embedding_width))
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size)) if config.decoder_bias else None

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(..., hidden) -> scores (..., vocab_size); with labels (...): fp32 losses and bool hits, both (...)."""
        if labels is None:
            return nn.functional.linear(hidden, self.weight, self.bias)[..., : self.vocab_size]
        dtype = compute_dtype(hidden)
        bias = None if self.bias is None else self.bias.to(dtype)
        losses, correct = _ProjectedCrossEntropy.apply(
            hidden.to(dtype).flatten(0, -2), self.weight.to(dtype), bias, labels.flatten(), self.vocab_size
        )
        return losses.view(labels.shape), correct.view(labels.shape)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Vocabulary projection and cross-entropy in one: the logits exist once, in the dtype of the inputs.

    Softmax is computed in fp32, a chunk of rows at a time, and its gradient (softmax minus one-hot) takes the
    place of the logits. The gradient of each row's loss, known only in backward, scales rows of smaller
    matrices there.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """hidden (M, H), weight (V', H), bias (V') or None, labels (M,) int64 -> losses (M,) fp32, correct (M,)."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = nn.functional.linear(hidden, weight, bias)
        precise = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(len(labels), dtype=precise, device=labels.device)
        correct = torch.empty_like(labels, dtype=torch.bool)
        size = max(1, _CHUNK_ELEMENTS[hidden.is_cuda] // len(weight))
        for start in range(0, len(labels), size):
            count = min(size, len(labels) - start)
            fill_losses(start, count, logits, labels, losses, correct, vocab_size, any(ctx.needs_input_grad))
        ctx.mark_non_differentiable(correct)
        ctx.save_for_backward(hidden, weight, logits, labels)
        return losses, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, score_gradient, labels = ctx.saved_tensors
        gradient = gradient.where(labels != NO_LABEL, 0.0)
        # Rows usually share one factor; divided by the largest it is exactly 1 and survives rounding to 16
        # bits.
        largest = gradient.abs().amax() if gradient.numel() else gradient.new_ones(())
        largest = largest.clamp_min(torch.finfo(gradient.dtype).tiny)
        share = (gradient / largest).to(hidden.dtype)
        # CUDA rounds a 0-dimensional factor to the 16 bits of the matrix, but not one with a dimension; a CPU rounds
        # neither, but would copy the matrix for the latter.
        factor = largest[None] if hidden.is_cuda else largest
        with torch.autocast(hidden.device.type, enabled=False):
            to_hidden = (score_gradient @ weight) * gradient[:, None]
            to_weight = (score_gradient.t() @ (hidden * share[:, None])).mul_(factor)
            to_bias = (share[None] @ score_gradient)[0].mul_(factor) if ctx.needs_input_grad[2] else None
        bias_gradient = None if to_bias is None else to_bias.to(weight.dtype)
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), bias_gradient, None, None


def fill_losses(
    start: int,
    count: int,
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    correct: Tensor,
    vocab_size: int,
    needs_gradient: bool,
) -> None:
    """Fill in the losses and hits of `count` rows, and let the gradient of the losses take the place of their logits.

    Args:
        logits: (M, V'), changed.
        labels: (M,) int64.
        losses: (M,), at least fp32, changed.
        correct: (M,) bool, changed.
    """
    rows = slice(start, start + count)
    chunk, target = logits[rows], labels[rows, None]
    counted = target != NO_LABEL
    target = target.where(counted, 0)
    chunk[:, vocab_size:] = -torch.inf
    shares = torch.softmax(chunk, -1, dtype=losses.dtype)
    largest, best = shares.max(-1, keepdim=True)
    # log(sum(exp)) from the largest probability, which is at least 1 / V' and never rounds to zero.
    normaliser = chunk.gather(1, best).to(losses.dtype) - largest.log()
    losses[rows] = (normaliser - chunk.gather(1, target)).where(counted, 0.0)[:, 0]
    correct[rows] = ((best == target) & counted)[:, 0]
    if needs_gradient:
        chunk.copy_(shares.scatter_add_(1, target, shares.new_full((), -1.0).expand(target.shape)))


class MaskedLanguageModelHead(Copied):
    """Scores of the vocabulary at given tokens: dense, activation, norm, projection; or the projection alone."""

    def __init__(self, config: BertConfig, word_embedding: nn.Embedding) -> None:
        super().__init__()
        if config.mlm_head != "linear":
            bias = config.linear_bias if config.transform_bias is None else config.transform_bias
            self.dense = nn.Linear(config.hidden_size, config.embedding_width, bias=bias)
            self.activation = ACTIVATIONS["relu" if config.mlm_head == "d2l" else config.hidden_act]
            self.norm = encoder_norm(config, config.embedding_width)
        self.transforms = config.mlm_head != "linear"
        self.decoder = VocabularyProjection(config)
        if config.tie_word_embeddings:
            shared = word_embedding.weight
            assert isinstance(shared, nn.Parameter)  # which torch does not declare
            self.decoder.weight = shared

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(..., hidden) -> scores (..., vocabulary); with labels (...): fp32 losses (0 if ignored) and bool hits."""
        extra = 0 if labels is None or hidden.dim() != 2 else extra_rows(len(hidden), hidden.is_cuda)
        if labels is not None and extra:
            hidden = nn.functional.pad(hidden, (0, 0, 0, extra))
            labels = nn.functional.pad(labels, (0, extra), value=NO_LABEL)
        if self.transforms:
            hidden = self.norm(self.activation(self.dense(hidden)))
        logits = self.decoder(hidden, labels)
        return tuple(each[:-extra] for each in logits) if extra else logits


class ClassifierTransform(nn.Module):
    """Dense, activation and norm before the classifiers of ModernBERT (arXiv 2412.13663)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = encoder_norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        result: Tensor = self.norm(self.activation(self.dense(hidden)))
        return result


class NextSentenceHead(Copied):
    """Whether segment B follows A: class 0 follows, class 1 is random."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, hidden) -> scores (B, 2)."""
        scores: Tensor = self.classifier(pooled)
        return scores


class DetectionHead(Copied):
    """A score for each token to be a replaced one: dense, activation, linear (ELECTRA, arXiv 2003.10555)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> scores (...), above 0 for replaced."""
        scores: Tensor = self.score(self.activation(self.dense(hidden))).squeeze(-1)
        return scores


class LayerMix(nn.Module):
    """A learned weighted sum of the layers' vectors: softmax of the weights, times a scale (Peters et al. 2018, eq.
    1).
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))
        self.scale = nn.Parameter(torch.ones(1))  # DeepSpeed does not broadcast tensors without dimensions

    def forward(self, vectors: Tensor) -> Tensor:
        """(N, layers, hidden) -> (N, hidden)."""
        return self.scale * torch.einsum("l,nlh->nh", self.weights.softmax(0).to(vectors.dtype), vectors)


def class_losses(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy (...) fp32 of scores (..., classes), 0 where the label (...) is ignored, and bool hits (...)."""
    flat = torch.nn.functional.cross_entropy(
        scores.flatten(0, -2).float(), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
    )
    return flat.view(labels.shape), scores.argmax(-1) == labels


def exponentials_by_group(scores: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax per group in parts: exp(score - maximum of its group) (N,), their sums and the maxima (num_groups,).

    log(sum) + maximum is the logsumexp.

    Args:
        group: (N,) int64, the group of each score (N,).
    """
    largest = scores.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, scores.detach(), "amax")
    shares = (scores - largest[group]).exp()
    return shares, torch.zeros_like(largest).index_add(0, group, shares), largest
