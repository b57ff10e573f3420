"""Names of weights: ours and those of `transformers`' BERT and ModernBERT. Pure functions on state dicts."""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import BertConfig, ModelError

StateDict = dict[str, Tensor]

# Modules: ours -> theirs, or several of theirs that ours stacks along the rows. {} is the number of a layer.
_BERT = {
    "bert.embeddings.word": ("bert.embeddings.word_embeddings",),
    "bert.embeddings.position": ("bert.embeddings.position_embeddings",),
    "bert.embeddings.segment": ("bert.embeddings.token_type_embeddings",),
    "bert.embeddings.norm": ("bert.embeddings.LayerNorm",),
    "bert.pooler.dense": ("bert.pooler.dense",),
    "masked_lm.dense": ("cls.predictions.transform.dense",),
    "masked_lm.norm": ("cls.predictions.transform.LayerNorm",),
    "next_sentence.classifier": ("cls.seq_relationship",),
    "classifier": ("classifier",),
    "span": ("qa_outputs",),
}
_BERT_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "cross_attention.query": ("crossattention.self.query",),
    "cross_attention.key_value": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attention.output": ("crossattention.output.dense",),
    "cross_attention_norm": ("crossattention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
_MODERN = {
    "bert.embeddings.word": ("model.embeddings.tok_embeddings",),
    "bert.embeddings.norm": ("model.embeddings.norm",),
    "bert.encoder.final_norm": ("model.final_norm",),
}
_MODERN_HEADS = {  # all of them under the same names there
    "masked_lm": {"masked_lm.dense": ("head.dense",), "masked_lm.norm": ("head.norm",)},
    "classifier": {"transform.dense": ("head.dense",), "transform.norm": ("head.norm",), "classifier": ("classifier",)},
    "span": {"transform.dense": ("head.dense",), "transform.norm": ("head.norm",), "span": ("classifier",)},
}
_MODERN_LAYER = {
    "attention.qkv": ("attn.Wqkv",),
    "attention.output": ("attn.Wo",),
    "attention_norm": ("attn_norm",),
    "feed_forward.up": ("mlp.Wi",),
    "feed_forward.down": ("mlp.Wo",),
    "feed_forward_norm": ("mlp_norm",),
}
# BERT has both; they are one where the embeddings are tied, else only the second is used.
_TIED_BIAS, _UNTIED_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"
_DECODERS = {  # family -> names of the vocabulary projection's weight and bias
    "bert": ("cls.predictions.decoder.weight", _TIED_BIAS),
    "modernbert": ("decoder.weight", "decoder.bias"),
}
# Theirs that repeat another parameter or hold no weight.
_REPEATED = (_UNTIED_BIAS, "bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_SEGMENTS = "bert.embeddings.token_type_embeddings.weight"  # BERT there is never without
VOCABULARY_ROWS = ("bert.embeddings.word.weight", "masked_lm.decoder.weight", "masked_lm.decoder.bias")

_BERT_DEFAULTS = (  # fields that must be as published
    "position_embedding", "segment_padding_index", "embedding_norm", "normalization", "norm_position",
    "gated_feed_forward", "linear_bias", "norm_bias", "decoder_bias", "pooler_activation", "mlm_head",
    "local_attention_window", "classifier_transform",
)
_MODERN_VALUES = {
    "position_embedding": "rotary", "type_vocab_size": 0, "embedding_norm": True, "normalization": "layer_norm",
    "norm_position": "pre", "first_attention_norm": False, "gated_feed_forward": True, "gate_bias": True,
    "pooler": False, "mlm_head": "bert", "is_decoder": False,
}


def family_of(config: BertConfig) -> str | None:
    """The architecture of `transformers` that this configuration is: bert, modernbert, or None of them."""
    published = BertConfig()
    if all(getattr(config, name) == getattr(published, name) for name in _BERT_DEFAULTS):
        return "bert"
    if config.local_attention_window and all(getattr(config, name) == value for name, value in _MODERN_VALUES.items()):
        return "modernbert"
    return None


def huggingface_names(config: BertConfig, head: str = "masked_lm") -> dict[str, tuple[str, ...]]:
    """Each of our parameters that a model of this configuration can have -> its names in `transformers`.

    `head`: masked_lm, classifier or span, which ModernBERT does not tell apart by name.
    """
    family = family_of(config)
    if family is None:
        raise ModelError("model: this variant has no counterpart in transformers; it is kept in our own format")
    modules = dict(_BERT) if family == "bert" else _MODERN | _MODERN_HEADS[head]
    for layer in range(config.num_hidden_layers):
        if family == "bert":
            parts, theirs = _BERT_LAYER, f"bert.encoder.layer.{layer}."
        else:
            parts, theirs = _MODERN_LAYER, f"model.layers.{layer}."
        ours = f"bert.encoder.layers.{layer}."
        modules |= {ours + key: tuple(theirs + name for name in names) for key, names in parts.items()}
    names = {
        f"{our_module}.{kind}": tuple(f"{module}.{kind}" for module in their_modules)
        for our_module, their_modules in modules.items()
        for kind in ("weight", "bias")
    }
    weight, bias = _DECODERS[family]
    names["masked_lm.decoder.bias"] = (bias,)
    if not config.tie_word_embeddings:
        names["masked_lm.decoder.weight"] = (weight,)
    return names


def to_huggingface(state_dict: StateDict, config: BertConfig) -> StateDict:
    """Our weights under the names of `transformers`, without the vocabulary's padding. Raises ModelError.

    ModernBERT has no next-sentence head: ours is left out there. A BERT without segments gets one of zeros.
    """
    head = next((head for head in ("classifier", "span") if f"{head}.weight" in state_dict), "masked_lm")
    names = huggingface_names(config, head)
    result: StateDict = {}
    for name, tensor in without_padding(state_dict, config).items():
        if name.startswith("next_sentence.") and family_of(config) == "modernbert":
            continue
        if name not in names:
            raise ModelError(f"{name}: this parameter has no counterpart in transformers")
        result.update(zip(names[name], tensor.chunk(len(names[name])), strict=True))
    if not config.tie_word_embeddings and _TIED_BIAS in result:
        result[_UNTIED_BIAS] = result[_TIED_BIAS]
    if not config.type_vocab_size and family_of(config) == "bert":
        result[_SEGMENTS] = next(iter(result.values())).new_zeros(1, config.hidden_size)
    return result


def from_huggingface(state_dict: StateDict, config: BertConfig, architecture: str = "") -> StateDict:
    """The inverse of `to_huggingface`; also takes the old names gamma and beta, and a bare encoder's names.

    `architecture`: the class's name in config.json, which alone tells ModernBERT's span from a classifier.
    Raises ModelError for parts that are missing and for names that do not belong to the architecture.
    """
    theirs = {}
    for name, tensor in state_dict.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        theirs[name] = tensor
    if not config.tie_word_embeddings and _UNTIED_BIAS in theirs:
        theirs[_TIED_BIAS] = theirs[_UNTIED_BIAS]
    bert = family_of(config) == "bert"
    prefix = "bert." if bert else "model."
    if not any(name.startswith(prefix) for name in theirs):
        theirs = {prefix + name: tensor for name, tensor in theirs.items()}
    if bert and not config.type_vocab_size:
        theirs.pop(_SEGMENTS, None)
    result: StateDict = {}
    head = "masked_lm"
    if "classifier.weight" in theirs:
        head = "span" if architecture.endswith("ForQuestionAnswering") else "classifier"
    for ours, parts in huggingface_names(config, head).items():
        if any(part in theirs for part in parts):
            missing = [part for part in parts if part not in theirs]
            if missing:
                raise ModelError(f"{missing[0]}: not found in the checkpoint, which has its siblings; it is damaged")
            result[ours] = torch.cat([theirs.pop(part) for part in parts])
    repeated = _REPEATED + (tuple(pair[0] for pair in _DECODERS.values()) if config.tie_word_embeddings else ())
    for name in repeated:
        theirs.pop(name, None)
    if theirs:
        raise ModelError(
            f"{sorted(theirs)[0]}: found in the checkpoint, not part of the architecture ({len(theirs)} such names)"
        )
    return with_padding(result, config)


def without_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """Each parameter once (a tied decoder is left out), the vocabulary's matrices cut to vocab_size rows."""
    result = dict(state_dict)
    if config.tie_word_embeddings and "bert.embeddings.word.weight" in result:
        result.pop("masked_lm.decoder.weight", None)
    for name in VOCABULARY_ROWS:
        if name in result:
            result[name] = result[name][: config.vocab_size]
    return result


def with_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """The inverse of `without_padding`: rows of zeros up to padded_vocab_size, and the tied decoder again."""
    result = dict(state_dict)
    for name in VOCABULARY_ROWS:
        if name in result:
            rows = result[name]
            if len(rows) != config.vocab_size:
                raise ModelError(f"{name}: found {len(rows)} rows, expected vocab_size = {config.vocab_size}")
            missing = config.padded_vocab_size - len(rows)
            result[name] = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    bare = config.mlm_head == "linear" and not config.decoder_bias  # a head that is the embeddings and nothing more
    if config.tie_word_embeddings and (bare or any(name.startswith("masked_lm.") for name in result)):
        result["masked_lm.decoder.weight"] = result["bert.embeddings.word.weight"]
    return result
