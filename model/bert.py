"""`BertModel` (embeddings, encoder, pooler) with its inputs and outputs, and `BertForPreTraining`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cloze.model.amx import extra_rows
from cloze.model.attention import (
    Layout,
    check_kernel,
    concatenated_layout,
    mask_bias,
    padded_layout,
    seen_tokens,
    select_kernel,
    sequences_and_positions,
)
from cloze.model.config import BertConfig, ModelError
from cloze.model.convolution import neighbours
from cloze.model.dropout import (
    AFTER_ATTENTION,
    AFTER_CROSS_ATTENTION,
    AFTER_FEED_FORWARD,
    IN_CONVOLUTION,
    DropoutKey,
    draw_seed,
    row_bits,
)
from cloze.model.embeddings import Embeddings, check_length, rotary_tables
from cloze.model.encoder import Context, Encoder, EncoderOutput
from cloze.model.heads import NO_LABEL, MaskedLanguageModelHead, NextSentenceHead, Pooler, class_losses
from cloze.model.huggingface import InFolders
from cloze.model.inputs import FurtherInputs, Inputs, ModelOptions
from cloze.model.relative import RelativeEmbedding

if TYPE_CHECKING:  # Python 3.10 lacks it
    from typing import Unpack


class BertOutput(NamedTuple):
    """Outputs of BertModel. Hidden states have the layout of the inputs: (T, hidden) or (B, S, hidden)."""

    last_hidden_state: Tensor
    first_hidden_state: Tensor
    """(B, hidden): of each sequence's first token."""
    pooled_output: Tensor | None
    """(B, hidden); None if the model has no pooler."""
    hidden_states: tuple[Tensor, ...] | None
    """On request: the embeddings and every layer's output."""
    attentions: tuple[Tensor, ...] | None
    """On request: every layer's attention probabilities, (B, heads, S, S)."""
    cross_attentions: tuple[Tensor, ...] | None
    """On request, from a decoder: the same over the encoder's tokens, (B, heads, S, S')."""


class BertModel(InFolders):
    """Embeddings, encoder and pooler.

    Args:
        attention_kernel: auto, eager, sdpa or varlen (see model/attention.py).
        gradient_checkpointing: none, all, or every_N.

    Raises:
        ModelError: for an unset vocabulary and for a kernel that does not support the configuration.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        attention_kernel: str = "auto",
        gradient_checkpointing: str = "none",
        add_pooler: bool = True,
    ) -> None:
        super().__init__()
        if not config.vocab_size:
            raise ModelError("model.vocab_size: found 0, expected the size of the data's vocabulary; set it")
        check_kernel(attention_kernel, config)
        self.config = config
        self.attention_kernel = attention_kernel
        self.embeddings = Embeddings(config)
        self.relative = RelativeEmbedding(config) if config.relative_terms else None
        self.encoder = Encoder(config, gradient_checkpointing)
        self.pooler = Pooler(config) if config.pooler and add_pooler else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sequence_offsets: Tensor | None = None,
        max_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        dropout_seed: int | None = None,
        read_tokens: Tensor | None = None,
        causal: bool = False,
    ) -> BertOutput:
        """Encode ids (or `inputs_embeds`, with an additional last dimension) in one of two layouts.

        Concatenated: ids (T,) with `sequence_offsets` (B + 1,) int32 and the host integer `max_sequence_length`, so
        that the host need not wait. Padded: ids (B, S) with `attention_mask` (B,) lengths, (B, S) or (B, S, S).

        Args:
            position_ids: those of embeddings and rotations; ALiBi, disentangled attention and local windows
                count tokens.
            encoder_hidden_states: (B, S', hidden); with `encoder_attention_mask` over S': a decoder's cross-attention.
            head_mask: (heads,) or (layers, heads), multiplies probabilities of attention and cross-attention.
            dropout_seed: key of all dropout masks in training; None: drawn from torch's default generator.
            read_tokens: (R,) of the concatenated tokens; `last_hidden_state` is then (R, hidden), and the last layer's
                feed-forward network skips the tokens that no head reads.
            causal: tokens attend to themselves and earlier ones alone, as in a decoder.

        Raises:
            ModelError: for inputs that do not fit.
        """
        tokens = _tokens(input_ids, inputs_embeds)
        longest = _longest(tokens, sequence_offsets, max_sequence_length, attention_mask)
        check_length(self.config, longest)
        if position_ids is None:
            position_ids = _position_ids(tokens, sequence_offsets)
        offsets, num_tokens = sequence_offsets, tokens.shape[0]  # no len(): an exported graph has any number
        shows_inside = output_hidden_states or output_attentions or head_mask is not None
        if offsets is not None and input_ids is not None and not (shows_inside or self.encoder.compiled):
            tokens, token_type_ids, position_ids, offsets = self._rounded(
                input_ids, token_type_ids, position_ids, offsets, longest
            )
            input_ids = tokens

        seed = self._dropout_seed(dropout_seed)
        bits = self._dropout_bits(seed, tokens, encoder_hidden_states is not None)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, bits[0])
        kernel = select_kernel(self.attention_kernel, self.config, hidden, output_attentions or head_mask is not None)
        layout = self._layout(kernel, hidden, offsets, longest, attention_mask, causal, grouped=not output_attentions)
        context = self._context(kernel, layout, position_ids, attention_mask, hidden.dtype, output_attentions)
        if encoder_hidden_states is not None:
            context = self._attend_to(context, encoder_hidden_states, encoder_attention_mask, hidden)
        last, first, encoded = self._encode(
            hidden, context, (seed, bits[1:]), head_mask, output_hidden_states, sequence_offsets, read_tokens
        )
        if read_tokens is None and offsets is not sequence_offsets:
            last = last[:num_tokens]
        pooled = None if self.pooler is None else self.pooler(first)
        return BertOutput(last, first, pooled, encoded.hidden_states, encoded.attentions, encoded.cross_attentions)

    def _layout(
        self,
        kernel: str,
        hidden: Tensor,
        offsets: Tensor | None,
        longest: int,
        attention_mask: Tensor | None,
        causal: bool,
        grouped: bool,
    ) -> Layout:
        """How attention sees the tokens `hidden`, (T, hidden) with offsets, else (B, S, hidden) with a mask."""
        causal = causal or self.config.is_decoder
        if offsets is None:
            layout = padded_layout(self.config, kernel, attention_mask, hidden, causal)
        else:
            grouped = grouped and not self.encoder.compiled  # groups differ between batches
            layout = concatenated_layout(
                self.config, kernel, offsets, longest, len(hidden), hidden.dtype, causal, grouped
            )
        if self.config.relative_position_buckets:
            layout = layout.with_bias(self.encoder.relative_bias(longest, hidden.dtype))
        return layout

    def _encode(
        self,
        hidden: Tensor,
        context: Context,
        drops: tuple[int | None, Sequence[Tensor | None]],
        head_mask: Tensor | None,
        output_hidden_states: bool,
        offsets: Tensor | None,
        read_tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor, EncoderOutput]:
        """Vectors of the tokens that are read, of the first tokens, and the encoder's output."""
        if head_mask is not None:
            head_mask = head_mask.expand(self.config.num_hidden_layers, self.config.num_attention_heads)
        if read_tokens is None:
            encoded = self.encoder(hidden, context, drops, head_mask, output_hidden_states)
            return encoded.last_hidden_state, first_tokens(encoded.last_hidden_state, offsets), encoded
        if offsets is None or output_hidden_states:
            raise ModelError("read_tokens: needs concatenated tokens, and no output_hidden_states; leave it out")
        read = torch.cat((offsets[:-1].to(read_tokens.dtype), read_tokens))
        sizes = [len(offsets) - 1, len(read_tokens)]
        extra = 0 if self.encoder.compiled else extra_rows(len(read), hidden.is_cuda)
        if extra and len(read) + extra <= len(hidden):  # dropout has no more bits than there are tokens
            read = nn.functional.pad(read, (0, extra))
            sizes.append(extra)
        encoded = self.encoder(hidden, context, drops, head_mask, read=read)
        first, last, *_ = encoded.last_hidden_state.split(sizes)
        return last, first, encoded

    def _rounded(
        self, ids: Tensor, segments: Tensor | None, positions: Tensor, offsets: Tensor, longest: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The inputs with more sequences at the end, of padding, so that the number of tokens is one of few
        (`extra_rows`). Nothing reads them, and they get no gradient."""
        extra = extra_rows(len(ids), ids.is_cuda)
        if not extra:
            return ids, segments, positions, offsets
        ends = [*range(len(ids) + longest, len(ids) + extra, longest), len(ids) + extra]
        return (
            nn.functional.pad(ids, (0, extra), value=self.config.pad_token_id),
            None if segments is None else nn.functional.pad(segments, (0, extra)),
            nn.functional.pad(positions, (0, extra)),
            torch.cat((offsets, offsets.new_tensor(ends))),
        )

    def _dropout_seed(self, given: int | None) -> int | None:
        """The key of the dropout masks, drawn if none is given; None if nothing is dropped."""
        if not (self.training and (self.config.drops_hidden or self.config.attention_probs_dropout_prob)):
            return None
        return draw_seed() if given is None else given

    def _dropout_bits(self, seed: int | None, tokens: Tensor, attends_across: bool) -> Sequence[Tensor | None]:
        """Random bits for dropout of hidden states, all made at once: (1, tokens) int32 for the embeddings, and
        (sub-layers, tokens) for each layer.
        """
        layers = self.config.num_hidden_layers
        if seed is None or not self.config.drops_hidden:
            return [None] * (1 + layers)
        across = (AFTER_CROSS_ATTENTION,) if attends_across else ()
        places: list[tuple[int, ...]] = [(AFTER_ATTENTION, *across, AFTER_FEED_FORWARD)] * layers
        if self.config.convolution_size:
            places[0] += (IN_CONVOLUTION,)
        keys = [DropoutKey(seed, layer + 1).at(place) for layer in range(layers) for place in places[layer]]
        # The embeddings' bits are there three times: if the first layer's were the second row, its storage offset would
        # equal the number of tokens; dynamo would specialize on that and compile the other layers again.
        first, *others = row_bits([DropoutKey(seed, 0).at(0)] * 3 + keys, tokens.numel(), tokens.device).split(
            [3, *map(len, places)]
        )
        return [first[:1], *others]

    def _context(
        self,
        kernel: str,
        layout: Layout,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        dtype: torch.dtype,
        output_attentions: bool,
    ) -> Context:
        """What all layers share but the encoder's states of a decoder."""
        config = self.config
        rotary = local_rotary = None
        if config.position_embedding == "rotary":
            rotary = rotary_tables(position_ids, config.head_size, config.rotary_theta)
            if config.local_attention_window:
                local_rotary = rotary_tables(position_ids, config.head_size, config.local_rotary_theta)
        distances = None if self.relative is None else self.relative(layout.length, dtype)
        beside = neighbours(layout, attention_mask, config.convolution_size) if config.convolution_size else None
        return Context(kernel, layout, rotary, local_rotary, distances, beside, output_attentions=output_attentions)

    def _attend_to(self, context: Context, states: Tensor, mask: Tensor | None, hidden: Tensor) -> Context:
        if not self.config.add_cross_attention:
            raise ModelError("encoder_hidden_states: needs model.add_cross_attention: true")
        if hidden.dim() != 3:
            raise ModelError("encoder_hidden_states: cross-attention needs padded inputs, (B, S), found (T,)")
        if states.dim() != 3 or states.shape[::2] != hidden.shape[::2]:
            raise ModelError(
                f"encoder_hidden_states: found shape {tuple(states.shape)}, expected ({len(hidden)}, S', "
                f"{self.config.hidden_size})"
            )
        batch, queries, _ = hidden.shape
        seen = seen_tokens("encoder_attention_mask", mask, batch, queries, states.shape[1])
        bias = None if seen is None else mask_bias(seen, hidden.dtype)
        return context._replace(cross_states=states.to(hidden.dtype), cross_bias=bias)


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """A value for each token, in the layout of the inputs.

    Raises:
        ModelError: unless exactly one of both is given.
    """
    tokens = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        raise ModelError("input_ids, inputs_embeds: expected exactly one of them")
    return tokens


def _longest(
    tokens: Tensor, offsets: Tensor | None, max_sequence_length: int | None, attention_mask: Tensor | None
) -> int:
    """Tokens of the longest sequence.

    Raises:
        ModelError: for a shape that is neither layout, and for a mask of concatenated tokens.
    """
    if offsets is not None and attention_mask is not None:
        raise ModelError("attention_mask: found one with sequence_offsets, which define the sequences; leave it out")
    if offsets is None:
        if tokens.dim() != 2:
            raise ModelError(f"input_ids: found shape {tuple(tokens.shape)}, expected (B, S), or sequence_offsets")
        return tokens.shape[1]
    if tokens.dim() != 1:
        raise ModelError(f"input_ids: found shape {tuple(tokens.shape)}, expected (T,) with sequence_offsets")
    return int(offsets.diff().max()) if max_sequence_length is None else max_sequence_length


def _position_ids(tokens: Tensor, offsets: Tensor | None) -> Tensor:
    """Positions counted from the start of each sequence, in the layout of `tokens`."""
    if offsets is None:
        return torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
    return sequences_and_positions(tokens.shape[0], offsets)[1]


def first_tokens(hidden: Tensor, offsets: Tensor | None) -> Tensor:
    """(B, hidden): the vector of each sequence's first token, in either layout."""
    return hidden[:, 0] if offsets is None else hidden.index_select(0, offsets[:-1])


def reading_no_others(offsets: Tensor) -> Tensor:
    """`read_tokens` where only the first tokens are read: the last layer skips all others."""
    return offsets.new_empty(0, dtype=torch.int64)


class PreTrainingOutput(NamedTuple):
    """Unreduced losses and hits of pretraining. M masked positions, B sequences."""

    mlm_losses: Tensor | None = None
    """(M,) fp32, 0 where the label is -100; in the shape of the labels; None without labels."""
    next_sentence_losses: Tensor | None = None
    """(B,) fp32, 0 where the label is -100."""
    mlm_correct: Tensor | None = None
    """(M,) bool: the most probable token is the label."""
    next_sentence_correct: Tensor | None = None
    """(B,) bool."""
    prediction_logits: Tensor | None = None
    """(M, vocabulary), or (T, vocabulary) and (B, S, vocabulary) without masked positions; only without labels."""
    next_sentence_logits: Tensor | None = None
    """(B, 2)."""
    num_masked: Tensor | None = None
    """Labels that have a loss."""
    num_pairs: Tensor | None = None
    """Pairs that have a loss."""
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def loss(self) -> Tensor | None:
        """Mean over masked tokens plus mean over pairs, as in Hugging Face; None without labels."""
        of_tokens = of_pairs = None
        if self.mlm_losses is not None and self.num_masked is not None:
            of_tokens = self.mlm_losses.sum() / self.num_masked
        if self.next_sentence_losses is not None and self.num_pairs is not None:
            of_pairs = self.next_sentence_losses.sum() / self.num_pairs
        return of_tokens if of_pairs is None else of_pairs if of_tokens is None else of_tokens + of_pairs


class BertPreTrained(InFolders):
    """An encoder under `bert`; subclasses add their head. Options are those of BertModel."""

    uses_pooler = True

    def __init__(self, config: BertConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, add_pooler=self.uses_pooler, **options)


class WithPretrainingHeads(BertPreTrained):
    """An encoder with the heads of pretraining, masked tokens and next sentence, or one of them. Options are those of
    BertModel.
    """

    predicts_tokens = predicts_pairs = True

    def __init__(self, config: BertConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        if self.predicts_tokens:
            self.masked_lm = MaskedLanguageModelHead(config, self.bert.embeddings.word)
        if self.predicts_pairs:
            self.next_sentence = NextSentenceHead(config)

    def predictions(
        self, encoded: BertOutput, hidden: Tensor, labels: Tensor | None, next_sentence_label: Tensor | None
    ) -> PreTrainingOutput:
        """Outputs of the heads.

        Args:
            hidden: (M, hidden) or (B, P, hidden) of the masked positions, or of all tokens; `labels` and
                `next_sentence_label` as in `BertForPreTraining.forward`.
        """
        output = PreTrainingOutput(hidden_states=encoded.hidden_states, attentions=encoded.attentions)
        if self.predicts_tokens:
            predicted = self.masked_lm(hidden, labels)
            if labels is None:
                output = output._replace(prediction_logits=predicted)
            else:
                output = output._replace(
                    mlm_losses=predicted[0], mlm_correct=predicted[1], num_masked=(labels != NO_LABEL).sum()
                )
        if self.predicts_pairs:
            scores = self.next_sentence(pooled(encoded))
            output = output._replace(next_sentence_logits=scores)
            if next_sentence_label is not None:
                losses, correct = class_losses(scores, next_sentence_label)
                output = output._replace(
                    next_sentence_losses=losses,
                    next_sentence_correct=correct,
                    num_pairs=(next_sentence_label != NO_LABEL).sum(),
                )
        return output


class BertForPreTraining(WithPretrainingHeads):
    """BERT with the two heads of pretraining: masked tokens and next sentence."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sequence_offsets: Tensor | None = None,
        max_sequence_length: int | None = None,
        masked_positions: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        dropout_seed: int | None = None,
        **inputs: Unpack[FurtherInputs],
    ) -> PreTrainingOutput:
        """Takes the inputs of BertModel.forward, and what to predict.

        Args:
            masked_positions: (M,) indices into the concatenated tokens, or (B, P) positions in each padded sequence;
                None predicts at every token. With `causal` a position predicts the token after it, without it its own
                token, which a model with `shifted_predictions` reads from the vector before it.
            labels: ids in the shape of the positions (or tokens), -100 has no loss.
            next_sentence_label: (B,) 0 follows, 1 random, -100 no loss.
        """
        encoded, hidden = encode_masked(
            self.bert,
            masked_positions,
            input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            sequence_offsets=sequence_offsets,
            max_sequence_length=max_sequence_length,
            dropout_seed=dropout_seed,
            **inputs,
        )
        return self.predictions(encoded, hidden, labels, next_sentence_label)


def _of_tokens_before(hidden: Tensor, offsets: Tensor | None) -> Tensor:
    """For each token the vector of the one before it; for the first of a sequence, which has none, its own."""
    if offsets is None:
        return torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
    before = torch.arange(-1, len(hidden) - 1, device=hidden.device)
    before[offsets[:-1]] += 1
    return hidden.index_select(0, before)


def pooled(encoded: BertOutput) -> Tensor:
    """(B, hidden) from the pooler, or the first tokens if the model has none."""
    return encoded.first_hidden_state if encoded.pooled_output is None else encoded.pooled_output


def encode_masked(
    bert: BertModel, positions: Tensor | None, input_ids: Tensor | None, **inputs: Unpack[Inputs]
) -> tuple[BertOutput, Tensor]:
    """Encode, and select the vectors by which the masked positions are predicted: (M,) of concatenated tokens, (B, P)
    of padded ones; without positions those of all tokens.
    """
    offsets = inputs.get("sequence_offsets")
    shifted = bert.config.shifted_predictions and not inputs.get("causal")  # causal: the next token anyway
    if positions is None:
        encoded = bert(input_ids, **inputs)
        hidden = encoded.last_hidden_state
        return encoded, _of_tokens_before(hidden, offsets) if shifted else hidden
    if shifted:
        positions = (positions - 1).clamp(min=0)
    if offsets is None:
        encoded = bert(input_ids, **inputs)
        hidden = encoded.last_hidden_state
        return encoded, hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
    # Compute all tokens if more would be read than there are, where the last layer saves nothing.
    tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
    assert tokens is not None, "there are ids or embeddings"
    read = len(positions) + len(offsets) - 1
    if inputs.get("output_hidden_states") or read > len(tokens):
        encoded = bert(input_ids, **inputs)
        return encoded, encoded.last_hidden_state.index_select(0, positions)
    encoded = bert(input_ids, **inputs, read_tokens=positions)
    return encoded, encoded.last_hidden_state
