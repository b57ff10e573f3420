"""`BertConfig` (architecture and sizes of a model), and `ModelError`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ModelError(ValueError):
    """Something about a model or its files that a user can fix: what, found, expected, what to do, in one line."""


# The resolution of masks (dropout.py): with a higher probability all elements would be dropped.
MOST_DROPPED = 1 - 2**-16
SINUSOIDAL = ("sinusoidal", "scaled_sinusoidal")
VectorPooling = Literal["cls", "mean", "max"]
"""How the vectors of the tokens become that of a text; cls: the first token's."""
Pooling = Literal["pooler", VectorPooling]
"""The same, or the model's pooler of the first token."""
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
AFTER_PADDING = (*ROBERTAS, "mpnet")  # families whose positions begin in the row after padding's


_LARGEST = 1 << 24  # upper bound of any size: larger values are mistakes, which would exhaust the memory
_BOUNDS: dict[str, tuple[int, float]] = {
    **dict.fromkeys(("hidden_size", "embedding_size", "num_attention_heads", "num_key_value_heads"), (1, _LARGEST)),
    **dict.fromkeys(("intermediate_size", "global_attention_every", "base_hidden_size"), (1, _LARGEST)),
    **dict.fromkeys(("vocab_size", "relative_position_buckets", "type_vocab_size"), (0, _LARGEST)),
    **dict.fromkeys(("local_attention_window", "relative_buckets", "convolution_size", "pad_token_id"), (0, _LARGEST)),
    **dict.fromkeys(("layer_norm_eps", "initializer_range"), (0, _LARGEST)),
    **dict.fromkeys(("embedding_initializer_range", "position_initializer_range"), (0, _LARGEST)),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), (0, MOST_DROPPED)),
    **dict.fromkeys(("attention_output_dropout_prob", "classifier_dropout"), (0, MOST_DROPPED)),
    # The deepest had 1,000 (DeepNet, arXiv 2203.00555). Layers that share their weights are in no file.
    **dict.fromkeys(("num_hidden_layers", "num_layer_groups", "base_num_layers"), (1, 1 << 12)),
    # No weight's shape confirms these.
    "max_position_embeddings": (1, 1 << 20),
    "relative_distances": (1, 1 << 20),
    "vocab_padding_multiple": (1, 1 << 12),
    "rotary_theta": (1, 1 << 40),
    "local_rotary_theta": (1, 1 << 40),
}


def check_kinds(section: str, config: Any) -> None:
    """Raise ModelError for the first field of a dataclass whose value is not of the declared type, or not one of its
    names. For values from files.
    """
    if wrong := field_of_another_kind(config, _is_of, _KINDS):
        name, value, expected = wrong
        shown = repr(value) if isinstance(value, str) else str(value)
        raise ModelError(f"{section}.{name}: found {shown[:40]}, expected {expected}")


def field_of_another_kind(
    config: Any, is_of: Callable[[object, type], bool], names: Mapping[type, str]
) -> tuple[str, Any, str] | None:
    """The first field of a dataclass whose value is not of the declared type, or not one of its names: the field's
    name, its value, and what is expected; None: there is none.

    Args:
        is_of: whether a value is of a type; that of list[str] is list.
        names: of types, as a message has them.
    """
    hints = get_type_hints(type(config))
    for name in (field.name for field in fields(config)):
        value, kind = getattr(config, name), hints[name]
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        if not any(_fits(value, each, is_of) for each in kinds):
            expected = [
                f"one of {', '.join(get_args(each))}"
                if get_origin(each) is Literal
                else names.get(get_origin(each) or each, str(each))
                for each in kinds
            ]
            return name, value, " or ".join(expected)
    return None


def _fits(value: object, kind: Any, is_of: Callable[[object, type], bool]) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return is_of(value, get_origin(kind) or kind)


def _is_of(value: object, kind: type) -> bool:
    if kind is float:  # whole numbers count as floats; infinities are refused
        return type(value) in (int, float) and value not in (math.inf, -math.inf) and value == value
    return type(value) is kind


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list",
    NoneType: "null",
}


@dataclass(frozen=True)
class BertConfig:
    """Shape and variant of a BERT. The defaults are BERT-base as published; names are those of Hugging Face.

    Raises:
        ModelError: naming the field, for unknown names, values outside their range and unsupported combinations.
    """

    vocab_size: int = 0
    """Number of tokens in the vocabulary; 0: taken from the data."""
    hidden_size: int = 768
    """Width of the residual stream; a multiple of num_attention_heads."""
    embedding_size: int | None = None
    """Width of the embeddings and of what the vocabulary projection reads, with maps from and to hidden_size, as in
    ELECTRA (there is none into the encoder if both are equal); null: hidden_size, as in BERT.
    """
    num_hidden_layers: int = 12
    """Number of encoder layers, at least 1."""
    num_layer_groups: int | None = None
    """Groups of neighbouring layers, as equal as can be, that share their weights, as in ALBERT (1: all layers share
    them); null: no layer shares any.
    """
    num_attention_heads: int = 12
    """Number of attention heads in each layer."""
    num_key_value_heads: int | None = None
    """Heads of keys and values, each for num_attention_heads / num_key_value_heads heads of queries (grouped queries,
    arXiv 2305.13245); null: num_attention_heads.
    """
    intermediate_size: int = 3072
    """Width of the feed-forward network (of each half, if it is gated)."""
    max_position_embeddings: int = 512
    """Longest sequence in tokens."""
    type_vocab_size: int = 2
    """Number of segment types; 0: no segment embedding."""
    hidden_act: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the feed-forward network; gelu is exact, gelu_tanh its approximation."""
    hidden_dropout_prob: float = 0.1
    """Dropout after the embeddings and after every sub-layer, 0 <= p < 1."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout of the attention probabilities, 0 <= p < 1."""
    attention_output_dropout_prob: float | None = None
    """Dropout after attention's output map, 0 <= p < 1; null: hidden_dropout_prob."""
    classifier_dropout: float | None = None
    """Dropout before a fine-tuning classifier; null: hidden_dropout_prob."""
    classifier_transform: bool = False
    """Whether dense, activation and norm stand before a fine-tuning classifier, as in ModernBERT."""
    layer_norm_eps: float = 1e-12
    """Added to the variance in every normalisation."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    initialization: Literal["bert", "megatron"] = "bert"
    """bert: all linear maps have initializer_range; megatron: those into the residual stream, and the masked-LM
    transform, have 1/sqrt(2 x num_hidden_layers) of it."""
    initializer_cutoff: float | None = None
    """Standard deviations at which the distribution of initial weights is truncated, above 0; null: not truncated."""
    embedding_initializer_range: float | None = None
    """Standard deviation of initial word and segment embeddings; null: initializer_range."""
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: initial weights and learning rates follow width and depth, so that a rate found with a small model serves a
    large one (arXiv 2203.03466, 2505.01618); the same as standard at the shape of base_hidden_size and
    base_num_layers. Heads must be of one size in all shapes, and intermediate_size in proportion to hidden_size.
    """
    base_hidden_size: int = 768
    """Width at which mup is the same as standard, of BERT-base, for which the other constants are known to be good; a
    multiple of the size of a head."""
    base_num_layers: int = 2
    """Number of layers at which mup is the same as standard."""
    pad_token_id: int = 0
    """Id of the padding token; its word embedding starts at zero and gets no gradient from lookups."""

    family: Literal["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "deberta-v2"] = "bert"
    """As which family the model is exported; a RoBERTa, XLM-RoBERTa, CamemBERT or MPNet reads its learned positions
    from row pad_token_id + 1 on. bert: the one that the other fields tell, or none.
    """
    position_embedding: Literal["learned", "sinusoidal", "scaled_sinusoidal", "rotary", "alibi", "none"] = "learned"
    """How positions enter: added vectors (learned; sinusoidal; scaled_sinusoidal: times one learned factor, at first
    1/sqrt(hidden_size)), rotated queries and keys, a bias on scores, or not.
    """
    position_initializer_range: float | None = None
    """Standard deviation of initial learned positions; null: initializer_range."""
    relative_position_buckets: int = 0
    """Classes of distances between tokens, each with a learned number for each head that is added to the scores of all
    layers, as in T5 and MPNet; 0: none.
    """
    rotary_theta: float = 10000.0
    """Base of the rotary frequencies in layers with global attention."""
    local_rotary_theta: float = 10000.0
    """Base of the rotary frequencies in layers with local attention."""
    segment_padding_index: int | None = None
    """Segment type of padding, whose embedding is zero and stays so; null: none."""
    relative_attention: Literal["none", "c2p", "p2c", "both"] = "none"
    """Terms that distances add to the scores (disentangled attention, DeBERTa): queries times vectors of distances
    (c2p, content to position), keys times such vectors (p2c), or both; together with position_embedding.
    """
    relative_distances: int = 512
    """Distances, in tokens on each side, that are told apart; with buckets: at which the last bucket begins."""
    relative_buckets: int = 0
    """Vectors of distances on each side: one for each of the first half, the others for ranges of logarithmically
    growing width; 0: one for each of relative_distances.
    """
    relative_norm: bool = False
    """Whether the vectors of distances are normalised."""
    relative_projections: bool = False
    """Whether each layer has maps of distances; false: its maps of queries and keys serve for distances too."""
    convolution_size: int = 0
    """Tokens, an odd number, of the convolution over the first layer's input that is added to its output and normalised
    with it (DeBERTa-v2-xlarge); 0: none.
    """
    convolution_act: Literal["tanh", "gelu", "gelu_tanh", "relu", "silu"] = "tanh"
    """Activation of the convolution."""
    embedding_norm: bool = True
    """Whether embeddings are normalised."""
    embedding_projection: Literal["last", "before_norm"] = "last"
    """Where embeddings of another width are mapped to hidden_size: last, with a bias (ELECTRA), or before their norm,
    without one (DeBERTa).
    """
    embedding_dropout: bool = True
    """Whether hidden_dropout_prob applies to the embeddings."""
    normalization: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Kind of every normalisation of embeddings and encoder."""
    norm_position: Literal["post", "pre"] = "post"
    """post: norm(x + f(x)), as published; pre: x + f(norm(x)) and one more norm after the last layer."""
    first_attention_norm: bool = True
    """pre only: whether layer 0 normalises before its attention (ModernBERT does not)."""
    gated_feed_forward: bool = False
    """Whether the activation gates a second projection (with gelu: GeGLU, with silu: SwiGLU)."""
    linear_bias: bool = True
    """Whether the linear maps of encoder and masked-LM transform have biases."""
    transform_bias: bool | None = None
    """Whether the masked-LM transform has a bias; null: as linear_bias."""
    gate_bias: bool = True
    """Whether the first map of a gated feed-forward network (both halves of it) has a bias too."""
    norm_bias: bool = True
    """Whether layer_norm has a bias (rms_norm never has)."""
    decoder_bias: bool = True
    """Whether the vocabulary projection has a bias."""
    pooler: bool = True
    """Whether dense + tanh is applied to the first token before sentence-level heads."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler."""
    mlm_head: Literal["bert", "d2l", "linear", "deberta"] = "bert"
    """bert: dense, activation, norm, vocabulary; d2l: the same with ReLU; linear: the vocabulary projection alone;
    deberta: as bert, under the names that a DeBERTa has with `legacy: false`.
    """
    shifted_predictions: bool = False
    """Whether the masked-LM head predicts a token from the vector of the token before it, as next tokens are predicted
    (masked next-token prediction, arXiv 2410.24159); the first token of a sequence is then not predicted.
    """
    tie_word_embeddings: bool = True
    """Whether the vocabulary projection shares the word embedding's weights."""
    local_attention_window: int = 0
    """Tokens that a local layer sees, half on each side (position difference <= window / 2); 0: all layers global."""
    global_attention_every: int = 3
    """With a local window: layers 0, n, 2n ... attend globally."""
    is_decoder: bool = False
    """Whether self-attention is causal."""
    add_cross_attention: bool = False
    """Whether every layer also attends to encoder_hidden_states; needs is_decoder."""
    vocab_padding_multiple: int = 64
    """The vocabulary's matrices are padded to a multiple of this; the padding is masked out and never exported."""

    @classmethod
    def preset(cls, name: str, **changes: object) -> BertConfig:
        """A configuration of configs/model/ by name: base, large, modern, ...

        Args:
            changes: fields with other values.

        Raises:
            ModelError: there is no such shape, or no such field.
        """
        folder = Path(__file__).parents[1] / "configs" / "model"
        shapes = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if name not in shapes:
            raise ModelError(f"preset: found {name!r}, expected one of {', '.join(shapes)}")
        kinds = get_type_hints(cls)
        for field in sorted(changes.keys() - kinds.keys()):
            near = get_close_matches(field, kinds, 1)
            raise ModelError(
                f"preset: found {field!r}, expected fields of BertConfig: "
                + (f"did you mean {near[0]}?" if near else ", ".join(kinds))
            )
        values: dict[str, Any] = {}
        for line in shapes[name].read_text(encoding="utf-8").splitlines():  # flat YAML; no library on this floor
            field, _, value = line.partition("#")[0].partition(":")
            if value := value.strip():
                # For an optional field the type besides None.
                kind = next(each for each in (*get_args(kinds[field]), kinds[field]) if each is not NoneType)
                values[field] = value == "true" if kind is bool else kind(value) if kind in (int, float) else value
        return cls(**values | changes)

    def __post_init__(self) -> None:
        check_kinds("model", self)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ModelError(f"model.{name}: found {str(value)[:20]}, expected {least} to {most}")
        if self.initializer_cutoff is not None and self.initializer_cutoff <= 0:
            raise ModelError(f"model.initializer_cutoff: found {self.initializer_cutoff}, expected more than 0")
        if self.hidden_size % self.num_attention_heads:
            raise ModelError(
                f"model.hidden_size: found {self.hidden_size}, expected a multiple of "
                f"model.num_attention_heads = {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ModelError(
                f"model.num_key_value_heads: found {self.num_key_value_heads}, expected a divisor of "
                f"model.num_attention_heads = {self.num_attention_heads}"
            )
        if self.vocab_size and self.pad_token_id >= self.vocab_size:
            raise ModelError(
                f"model.pad_token_id: found {self.pad_token_id}, expected less than "
                f"model.vocab_size = {self.vocab_size}"
            )
        self._check_positions()
        self._check_layer_groups()
        self._check_relative_positions()
        self._check_convolution()
        self._check_layers()
        self._check_embeddings()
        if self.parametrization == "mup":
            self._check_mup()

    def _check_positions(self) -> None:
        if self.position_embedding == "rotary" and self.head_size % 2:
            raise ModelError(
                "model.position_embedding: rotary needs an even head size; change hidden_size or num_attention_heads"
            )
        if self.position_embedding in SINUSOIDAL and self.embedding_width % 2:
            raise ModelError("model.position_embedding: sinusoids need an even hidden_size (or embedding_size)")
        if self.family in AFTER_PADDING and self.position_embedding != "learned":
            raise ModelError(f"model.family: {self.family} needs position_embedding: learned")

    def _check_layer_groups(self) -> None:
        if self.num_layer_groups is None:
            return
        if self.num_layer_groups > self.num_hidden_layers:
            raise ModelError("model.num_layer_groups: must be at most num_hidden_layers")
        if self.local_attention_window > 0 or not self.first_attention_norm:
            raise ModelError(
                "model.num_layer_groups: shared layers need local_attention_window: 0 and first_attention_norm: true"
            )

    def _check_relative_positions(self) -> None:
        if self.relative_position_buckets % 4:
            raise ModelError(
                "model.relative_position_buckets: must be 0, or a multiple of 4, half of it for each direction"
            )
        if self.relative_terms and self.position_embedding in ("rotary", "alibi"):
            raise ModelError(
                "model.relative_attention: needs position_embedding learned, sinusoidal, scaled_sinusoidal or none"
            )
        if self.relative_terms and self.num_key_value_heads is not None:
            raise ModelError("model.relative_attention: needs num_key_value_heads: null")
        if self.relative_buckets and not 2 <= self.relative_buckets < 2 * (self.relative_distances - 1):
            raise ModelError(
                "model.relative_buckets: must be at least 2, and half of them less than relative_distances - 1"
            )

    def _check_convolution(self) -> None:
        if not self.convolution_size:
            return
        if self.convolution_size % 2 == 0:
            raise ModelError("model.convolution_size: must be 0 or odd")
        if self.norm_position != "post" or self.is_decoder or self.num_layer_groups is not None:
            raise ModelError(
                "model.convolution_size: needs norm_position: post, is_decoder: false and num_layer_groups: null"
            )

    def _check_layers(self) -> None:
        if self.add_cross_attention and not self.is_decoder:
            raise ModelError("model.add_cross_attention: true needs is_decoder: true")
        if self.shifted_predictions and self.is_decoder:
            raise ModelError("model.shifted_predictions: true needs is_decoder: false")
        if not self.first_attention_norm and self.norm_position != "pre":
            raise ModelError("model.first_attention_norm: false needs norm_position: pre")
        if not self.gate_bias and not (self.gated_feed_forward and self.linear_bias):
            raise ModelError("model.gate_bias: false needs gated_feed_forward: true and linear_bias: true")
        if self.local_attention_window % 2:
            raise ModelError("model.local_attention_window: an odd window has no middle, give an even one")

    def _check_embeddings(self) -> None:
        narrow = self.embedding_width != self.hidden_size
        if self.position_initializer_range is not None and self.position_embedding != "learned":
            raise ModelError("model.position_initializer_range: only learned positions have weights to draw")
        if self.mlm_head == "linear" and narrow:
            raise ModelError(
                "model.mlm_head: linear has no map from hidden_size to embedding_size; leave embedding_size out"
            )
        if self.mlm_head == "deberta" and (narrow or not self.tie_word_embeddings):
            raise ModelError(
                "model.mlm_head: deberta reads the word embeddings; leave embedding_size and tie_word_embeddings out"
            )
        if self.segment_padding_index is not None and not 0 <= self.segment_padding_index < self.type_vocab_size:
            raise ModelError("model.segment_padding_index: must be below type_vocab_size")

    def _check_mup(self) -> None:
        if self.base_hidden_size % self.head_size:
            raise ModelError(
                f"model.base_hidden_size: must be a multiple of the head size {self.head_size}, since wider models "
                "have more heads and not larger ones"
            )
        if self.initialization != "bert":
            raise ModelError("model.parametrization: mup has initial weights of its own; leave initialization out")
        if self.mlm_head == "linear":
            raise ModelError(
                "model.parametrization: mup scales the scores of the vocabulary in the norm before them; give an "
                "mlm_head other than linear"
            )
        if self.embedding_width != self.hidden_size:
            raise ModelError(
                "model.parametrization: mup needs embeddings of the model's width; leave embedding_size out"
            )

    @property
    def base_shape(self) -> BertConfig:
        """The shape whose learning rate this one has: with mup the base's, else its own."""
        if self.parametrization == "standard":
            return self
        return replace(
            self,
            hidden_size=self.base_hidden_size,
            num_hidden_layers=self.base_num_layers,
            num_layer_groups=None,
            num_attention_heads=self.base_hidden_size // self.head_size,
            num_key_value_heads=None,
            intermediate_size=max(1, round(self.intermediate_size / self.width_multiple)),
        )

    @property
    def width_multiple(self) -> float:
        """hidden_size as a multiple of the base's (mup)."""
        return self.hidden_size / self.base_hidden_size

    @property
    def depth_multiple(self) -> float:
        """num_hidden_layers as a multiple of the base's (mup)."""
        return self.num_hidden_layers / self.base_num_layers

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def key_value_width(self) -> int:
        """Width of all keys, or of all values, of a token."""
        return self.key_value_heads * self.head_size

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def relative_terms(self) -> tuple[str, ...]:
        """The terms of disentangled attention, p2c before c2p."""
        return {"none": (), "both": ("p2c", "c2p")}.get(self.relative_attention, (self.relative_attention,))

    @property
    def relative_span(self) -> int:
        """Vectors of distances on each side."""
        return self.relative_buckets or self.relative_distances

    @property
    def score_scale(self) -> float:
        """Factor of the scores, and of each of their terms."""
        return float((self.head_size * (1 + len(self.relative_terms))) ** -0.5)

    @property
    def first_position(self) -> int:
        """Row of the learned positions that belongs to a sequence's first token."""
        return self.pad_token_id + 1 if self.family in AFTER_PADDING else 0

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned positions, those before the first token's included."""
        return self.first_position + self.max_position_embeddings

    @property
    def num_distinct_layers(self) -> int:
        """Number of layers with weights of their own."""
        return self.num_hidden_layers if self.num_layer_groups is None else self.num_layer_groups

    def layer_group(self, layer: int) -> int:
        """Which of the layers with weights of their own layer `layer` (from 0) is, computed as in transformers."""
        return int(layer / (self.num_hidden_layers / self.num_distinct_layers))

    @property
    def biases_scores(self) -> bool:
        """Whether positions enter by numbers added to the scores of attention, which flash attention does not take."""
        return self.position_embedding == "alibi" or self.relative_position_buckets > 0 or bool(self.relative_terms)

    @property
    def attention_output_dropout(self) -> float:
        """Dropout after attention's output map."""
        given = self.attention_output_dropout_prob
        return self.hidden_dropout_prob if given is None else given

    @property
    def dropout_before_classifier(self) -> float:
        """Dropout of a fine-tuned classifier's inputs."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    @property
    def drops_hidden(self) -> bool:
        """Whether dropout is applied to hidden states in training."""
        return self.hidden_dropout_prob > 0 or self.attention_output_dropout > 0

    @property
    def segments(self) -> tuple[int, int]:
        """Segment ids of A and B: the first two that are not the padding's, if there are two."""
        types = [number for number in range(self.type_vocab_size) if number != self.segment_padding_index]
        return (types[0], types[1]) if len(types) > 1 else (0, 1)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary's matrices: vocab_size rounded up to a multiple of vocab_padding_multiple."""
        return -(-self.vocab_size // self.vocab_padding_multiple) * self.vocab_padding_multiple

    def attends_locally(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) attends only within its window."""
        return self.local_attention_window > 0 and layer % self.global_attention_every != 0
