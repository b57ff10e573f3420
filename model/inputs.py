"""Types of what models are called with."""

from typing import Any, TypeAlias, TypedDict

from torch import Tensor

# torch's type of an autograd function's context has none of the attributes that a function may add to it.
AutogradContext: TypeAlias = Any


class FurtherInputs(TypedDict, total=False):
    """Keyword arguments of `BertModel.forward`, which explains them, that few callers need."""

    inputs_embeds: Tensor | None
    head_mask: Tensor | None
    encoder_hidden_states: Tensor | None
    encoder_attention_mask: Tensor | None
    output_hidden_states: bool
    output_attentions: bool
    read_tokens: Tensor | None
    causal: bool
    features: Tensor
    """In the place of ids: results of a head's `features`."""


class Inputs(FurtherInputs, total=False):
    """Keyword arguments of `BertModel.forward` beside the ids."""

    token_type_ids: Tensor | None
    position_ids: Tensor | None
    attention_mask: Tensor | None
    sequence_offsets: Tensor | None
    max_sequence_length: int | None
    dropout_seed: int | None


class ModelOptions(TypedDict, total=False):
    """Options of `BertModel` that every model passes on."""

    attention_kernel: str
    gradient_checkpointing: str
