"""The Transformer encoder: layers of attention and feed-forward network, and gradient checkpointing."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic_sizes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cloze.model.attention import KERNELS, Layout, leave_graphs
from cloze.model.config import BertConfig, ModelError
from cloze.model.convolution import Convolution, Neighbours
from cloze.model.dropout import IN_ATTENTION, IN_CROSS_ATTENTION, IN_DISTANCES, DropoutKey, keep_masks, keep_scale
from cloze.model.embeddings import encoder_norm, rotate_packed
from cloze.model.relative import Distances, Positions, RelativeBias, RelativeTerms
from cloze.model.residual_linear import branch
from cloze.model.weight_copies import Copied

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda hidden: nn.functional.gelu(hidden, approximate="tanh"),
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}


# Limit of graphs in one process. Dynamo counts all layers as one code object, and beyond its default limit of 8 it runs
# further variants uncompiled. There are up to 24: first layer without norm, global, local, and last layer, which reads
# some tokens; for sequences of one length, of several lengths, and a single sequence; for training and evaluation.
# Graph breaks add some, and runs that begin with next tokens have causal ones beside them.
_GRAPHS = 64


class Context(NamedTuple):
    """Values that all layers of one forward share."""

    kernel: str
    layout: Layout
    rotary: tuple[Tensor, Tensor] | None = None
    local_rotary: tuple[Tensor, Tensor] | None = None
    distances: Distances | None = None
    neighbours: Neighbours | None = None
    """Of a model with a convolution."""
    cross_states: Tensor | None = None
    """(B, S', hidden) of the encoder that a decoder attends to."""
    cross_bias: Tensor | None = None
    """(B, 1, 1 or S, S') added to the scores of cross-attention."""
    output_attentions: bool = False


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection, its output projection included."""

    joins_gradients = False
    """Whether the gradients of queries, keys and values go through one product each of weight and input (`branch`)."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.num_heads = [config.num_attention_heads, config.key_value_heads, config.key_value_heads]
        self.probability = config.attention_probs_dropout_prob
        self.local = config.attends_locally(layer)
        self.widths = [heads * config.head_size for heads in self.num_heads]
        self.qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=config.linear_bias)
        self.stacked = {"qkv": self.widths}
        """Weights of several maps, with the rows of each (in the optimizers, Muon's matrices)."""
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.scale = config.score_scale
        self.relative = RelativeTerms(config) if config.relative_terms else None

    def forward(
        self, hidden: Tensor, context: Context, seed: int | None, head_mask: Tensor | None, read: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(..., hidden) -> (..., hidden), or (R, hidden) of the tokens `read` (R,); from the eager kernel also
        the probabilities (B, heads, S, S); and the inputs, for a residual (`branch`).
        """
        layout, rotary = context.layout, context.local_rotary if self.local else context.rotary
        extra = {"head_mask": head_mask} if context.kernel == "eager" else {}
        if context.kernel == "varlen" and rotary is None:
            hidden, *parts = branch(hidden, self.qkv, self.widths, joined=self.joins_gradients)
            mixed, _ = self._attend(
                [part.unflatten(-1, (-1, self.head_size)) for part in parts],
                context.kernel,
                layout,
                seed,
                extra,
            )
            return self.output(_rows(mixed, read)), None, hidden
        positions = None
        if self.relative is not None and context.distances is not None:
            positions = self.relative(context.distances, self.qkv)
        packed = self.qkv(hidden)
        if rotary is not None:
            packed = rotate_packed(packed, sum(self.num_heads[:2]), self.head_size, rotary)
        if layout.groups:
            groups = packed.split([group.num_tokens for group in layout.groups])
            seeds = [None if seed is None else seed + number for number in range(len(groups))]
            mixed = torch.cat(
                [
                    self._attend(self._heads(part, group), context.kernel, group, group_seed, extra, positions)[0]
                    for part, group, group_seed in zip(groups, layout.groups, seeds, strict=True)
                ]
            )
            return self.output(_rows(mixed, read)), None, hidden
        heads = self._heads(packed, None if context.kernel == "varlen" else layout)
        mixed, probabilities = self._attend(heads, context.kernel, layout, seed, extra, positions)
        return self.output(_rows(mixed, read)), probabilities if context.output_attentions else None, hidden

    def _heads(self, packed: Tensor, layout: Layout | None) -> Sequence[Tensor]:
        """(..., width of all) -> queries, keys and values (..., heads, head size), padded as the layout says."""
        packed = packed if layout is None else layout.pad(packed)
        heads: Sequence[Tensor] = packed.unflatten(-1, (-1, self.head_size)).split(self.num_heads, -2)
        return heads

    def _attend(
        self,
        heads: Sequence[Tensor],
        kernel: str,
        layout: Layout,
        seed: int | None,
        extra: Mapping[str, object],
        positions: Positions | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values (..., heads, head size) -> (..., hidden), and probabilities from the eager
        kernel.
        """
        if kernel == "varlen":
            extra = {"local": self.local}
        bias = layout.local_bias if self.local else layout.bias
        if positions is not None:
            terms = positions.scores(*heads[:2])
            bias = terms if bias is None else terms.add_(bias)
            extra = {**extra, "scale": self.scale}
        mixed, probabilities = KERNELS[kernel](*heads, layout, bias, self.probability, seed, **extra)
        mixed = mixed.flatten(-2)
        return mixed if kernel == "varlen" else layout.unpad(mixed), probabilities


def _rows(hidden: Tensor, read: Tensor | None) -> Tensor:
    return hidden if read is None else hidden.index_select(0, read)


class CrossAttention(nn.Module):
    """Attention of a decoder's padded tokens (B, S, hidden) to an encoder's (B, S', hidden)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.probability = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.key_value = nn.Linear(config.hidden_size, 2 * config.key_value_width, bias=config.linear_bias)
        self.stacked = {"query": [config.hidden_size], "key_value": [config.key_value_width] * 2}
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def forward(
        self, hidden: Tensor, context: Context, seed: int | None, head_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, hidden) -> (B, S, hidden); from the eager kernel also the probabilities (B, heads, S, S')."""
        query = self.query(hidden).unflatten(-1, (-1, self.head_size))
        key, value = self.key_value(context.cross_states).unflatten(-1, (-1, self.head_size)).chunk(2, -2)
        extra = {"head_mask": head_mask} if context.kernel == "eager" else {}
        mixed, probabilities = KERNELS[context.kernel](
            query, key, value, context.layout, context.cross_bias, self.probability, seed, **extra
        )
        return self.output(mixed.flatten(-2)), probabilities if context.output_attentions else None


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, optionally gated by a third (arXiv 2002.05202)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.gated = config.gated_feed_forward
        width = config.intermediate_size * (2 if self.gated else 1)
        self.up = nn.Linear(config.hidden_size, width, bias=config.linear_bias and config.gate_bias)
        self.stacked = {"up": [config.intermediate_size] * 2} if self.gated else {}
        self.activation = ACTIVATIONS[config.hidden_act]
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, hidden: Tensor, branches: bool) -> tuple[Tensor, Tensor]:
        """(..., hidden) -> (..., hidden), and the inputs, for a residual.

        Args:
            branches: by `branch`, of (T, hidden).
        """
        hidden, inner = branch(hidden, self.up) if branches else (hidden, self.up(hidden))
        if self.gated:
            inner, gate = inner.chunk(2, dim=-1)
            return self.down(self.activation(inner) * gate), hidden
        return self.down(self.activation(inner)), hidden


class EncoderLayer(Copied):
    """Attention, cross-attention in a decoder with it, feed-forward; each with residual, norm and dropout."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.pre = config.norm_position == "pre"
        self.probability, self.attention_probability = config.hidden_dropout_prob, config.attention_output_dropout
        self.scale, self.attention_scale = keep_scale(self.probability), keep_scale(self.attention_probability)
        self.attention = Attention(config, layer)
        normed = layer > 0 or config.first_attention_norm
        self.attention_norm = encoder_norm(config) if normed else nn.Identity()
        if config.add_cross_attention:
            self.cross_attention = CrossAttention(config)
            self.cross_attention_norm = encoder_norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = encoder_norm(config)
        convolves = config.convolution_size and layer == 0
        self.convolution = Convolution(config, ACTIVATIONS[config.convolution_act]) if convolves else None

    def forward(
        self,
        hidden: Tensor,
        context: Context,
        bits: Tensor | None,
        seeds: tuple[int | None, int | None],
        head_mask: Tensor | None = None,
        read: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(..., hidden) -> (..., hidden), attention and cross-attention probabilities (from the eager kernel).

        Args:
            bits: (sub-layers, tokens of the result) int32, random bits of dropout after each sub-layer (`row_bits`) and
                in the convolution; None: no dropout.
            seeds: seeds of dropout inside the two attentions.
            read: (R,) of the concatenated tokens: all are attended to, but everything after attention is computed only
                for these, (R, hidden).
        """
        given, of_convolution = hidden, None
        if self.convolution is not None and bits is not None:
            bits, of_convolution = bits[:-1], bits[-1:]
        first, *between, last = (None, None, None) if bits is None else self._keep(bits, hidden)
        inputs = self.attention_norm(hidden) if self.pre else hidden
        change, probabilities, inputs = self.attention(inputs, context, seeds[0], head_mask, read)
        hidden = _rows(hidden if self.pre else inputs, read)
        hidden = self._add(hidden, change, first, self.attention_norm, self.attention_scale)
        cross_probabilities = None
        if context.cross_states is not None:
            inputs = self.cross_attention_norm(hidden) if self.pre else hidden
            change, cross_probabilities = self.cross_attention(inputs, context, seeds[1], head_mask)
            hidden = self._add(hidden, change, between[0], self.cross_attention_norm, self.attention_scale)
        inputs = self.feed_forward_norm(hidden) if self.pre else hidden
        change, inputs = self.feed_forward(inputs, context.kernel == "varlen" and not self.pre)
        hidden = self._add(hidden if self.pre else inputs, change, last, self.feed_forward_norm, self.scale)
        if self.convolution is not None and context.neighbours is not None:
            hidden = self.convolution(hidden, given, context.neighbours, of_convolution, read)
        return hidden, probabilities, cross_probabilities

    def _keep(self, bits: Tensor, hidden: Tensor) -> Sequence[Tensor | None]:
        """Dropout mask (0 and 1) of each sub-layer's output; None: no dropout."""
        if self.attention_probability == self.probability:
            return keep_masks(bits, hidden.shape[-1], self.probability, hidden.dtype)
        return [
            keep if probability else None
            for part, probability in ((bits[:-1], self.attention_probability), (bits[-1:], self.probability))
            for keep in (
                keep_masks(part, hidden.shape[-1], probability, hidden.dtype) if probability else part.unbind()
            )
        ]

    def _add(self, hidden: Tensor, change: Tensor, keep: Tensor | None, norm: nn.Module, scale: float) -> Tensor:
        if torch.compiler.is_compiling() and not self.pre and torch.is_grad_enabled():
            # Write and keep the norm's input. Otherwise compilers keep `change`, and add and mask again in backward:
            # one more pass over three tensors.
            hidden = checkpoint(
                _residual, hidden, change, keep, scale, use_reentrant=False, context_fn=_SAVED, preserve_rng_state=False
            )
        else:
            hidden = _residual(hidden, change, keep, scale)
        return hidden if self.pre else norm(hidden)


def _residual(hidden: Tensor, change: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    # One pass for dropout and residual: hidden + scale * change * keep.
    return hidden + change if keep is None else torch.addcmul(hidden, change, keep.view_as(change), value=scale)


def _save(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


_SAVED = partial(create_selective_checkpoint_contexts, _save)


def _is_no_hint(record: logging.LogRecord) -> bool:
    """False for torch's hint, printed at each start, that `_residual` should not change tensors in place: it does
    not.
    """
    return "context_fn is passed" not in record.getMessage()


class EncoderOutput(NamedTuple):
    """Output of the encoder; tuples only if they were requested."""

    last_hidden_state: Tensor
    """(T, hidden) or (B, S, hidden)."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The embeddings and the output of every layer."""
    attentions: tuple[Tensor, ...] | None = None
    """Probabilities of every layer, (B, heads, S, S)."""
    cross_attentions: tuple[Tensor, ...] | None = None


class Encoder(nn.Module):
    """The stack of layers, of which neighbouring ones may be one layer, run several times.

    Args:
        gradient_checkpointing: none, all, or every_N (layers 0, N, 2N ... are recomputed).
    """

    def __init__(self, config: BertConfig, gradient_checkpointing: str = "none") -> None:
        super().__init__()
        self.config = config
        self.compiled = False
        self.checkpoint_every = parse_checkpointing(gradient_checkpointing)
        self.layers = nn.ModuleList(EncoderLayer(config, layer) for layer in range(config.num_distinct_layers))
        if config.relative_position_buckets:
            self.relative_bias = RelativeBias(config)
        if config.norm_position == "pre":
            self.final_norm = encoder_norm(config)

    def forward(
        self,
        hidden: Tensor,
        context: Context,
        drops: tuple[int | None, Sequence[Tensor | None]],
        head_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        read: Tensor | None = None,
    ) -> EncoderOutput:
        """Run the layers on (T, hidden) or (B, S, hidden).

        Args:
            head_mask: (layers, heads).
            drops: key of dropout inside attentions, and for each layer the random bits for dropout of hidden states,
                (sub-layers, tokens) int32; None: no dropout.
            read: (R,) tokens whose final vectors are used: for the others the last layer computes only attention, and
                the last hidden state is (R, hidden).
        """
        states, attentions, cross_attentions = [hidden], [], []
        seed, bits = drops
        for number in range(self.config.num_hidden_layers):
            layer = self.layers[self.config.layer_group(number)]
            wanted = read if number == self.config.num_hidden_layers - 1 else None
            keys = bits[number], None if seed is None else DropoutKey(seed, number + 1)
            mask = None if head_mask is None else head_mask[number]
            if self.checkpoint_every and number % self.checkpoint_every == 0 and torch.is_grad_enabled():
                # Dropout is drawn from keys, so there is no generator state to preserve.
                outputs = checkpoint(
                    self._run,
                    layer,
                    hidden,
                    context,
                    keys,
                    mask,
                    wanted,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                outputs = self._run(layer, hidden, context, keys, mask, wanted)
            hidden, probabilities, cross_probabilities = outputs
            if output_hidden_states:
                states.append(hidden)
            attentions.append(probabilities)
            cross_attentions.append(cross_probabilities)
        if self.config.norm_position == "pre":
            hidden = self.final_norm(hidden)
            states[-1] = hidden
        return EncoderOutput(
            hidden,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if context.output_attentions else None,
            tuple(cross_attentions) if context.output_attentions and context.cross_states is not None else None,
        )

    def compile_layers(self, backend: str | Callable[..., object] = "inductor") -> None:
        """Compile the layers' forward and backward with torch.compile, for any number of tokens. For CUDA.

        Layers of one kind share a graph. Names of weights do not change. On a CPU there is no gain; attention dropout
        in the sdpa kernel breaks the graph and costs a part of the gain.

        Args:
            backend: that of torch.compile.
        """
        leave_graphs()
        # Sizes that happen to be alike at first, as of a micro-batch of 128 sequences of 128 tokens, are not taken for
        # one: a graph for that batch alone would be compiled, and another one at the next batch.
        symbolic_sizes.use_duck_shape = False
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_hint)
        self.compiled = True
        for layer in self.layers:
            layer.compile(dynamic=True, backend=backend, recompile_limit=_GRAPHS)

    def _run(
        self,
        layer: nn.Module,
        hidden: Tensor,
        context: Context,
        keys: tuple[Tensor | None, DropoutKey | None],
        head_mask: Tensor | None,
        read: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Call a layer with its random bits and seeds of dropout."""
        bits, key = keys
        if bits is not None and read is not None:
            bits = bits[:, : len(read)]
        seeds: tuple[int | None, int | None] = (None, None)
        if key is not None and self.config.attention_probs_dropout_prob:
            seeds = key.at(IN_ATTENTION), key.at(IN_CROSS_ATTENTION)
        if key is not None and context.distances is not None:
            distances = context.distances.dropped(self.config.hidden_dropout_prob, key.at(IN_DISTANCES))
            context = context._replace(distances=distances)
        result: tuple[Tensor, Tensor | None, Tensor | None] = layer(hidden, context, bits, seeds, head_mask, read)
        return result


def parse_checkpointing(value: str) -> int:
    """none -> 0, all -> 1, every_N -> N: which layers are recomputed.

    Raises:
        ModelError: for another value.
    """
    if value in ("none", "all"):
        return int(value == "all")
    if match := re.fullmatch("every_([1-9][0-9]{0,8})", value):
        return int(match[1])
    raise ModelError(f"gradient_checkpointing: found {value!r}, expected none, all, or every_N such as every_2")
