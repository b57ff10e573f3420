"""DeBERTa-v2 and -v3: BERT with disentangled attention."""

from collections.abc import Collection, Mapping

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.bert import ENCODER_FIELDS, LAYER, buffers, embeddings
from cloze.model.families.family import ACTIVATIONS, WITHOUT_PAIRS, Family, Json, Names, Part, our_activation

_TERMS = {"none": None, "c2p": "c2p", "p2c": "p2c", "both": "p2c|c2p"}
_RELATIVE = ("relative_attention", "relative_distances", "relative_buckets", "relative_norm", "relative_projections")
# The masked-LM head has two sets of names: with `legacy: true` BERT's, else those of the first DeBERTa.
_LEGACY = {
    "cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
    "cls.predictions": "lm_predictions.lm_head",  # its bias
}


class Deberta(Family):
    """DeBERTa-v2 (arXiv 2006.03654) and -v3 (arXiv 2111.09543). Only classifiers of sequences have a pooler, and no
    class has a head for next sentences or for replaced tokens.
    """

    class_prefixes = {"deberta-v2": "DebertaV2"}
    class_suffixes = WITHOUT_PAIRS
    classes_with_pooler = ("BertForSequenceClassification", "BertForMultipleChoice")
    heads_with_pooler = ("sequence", "choice")
    structure = {"embedding_projection": "before_norm", "is_decoder": False, "add_cross_attention": False}
    fields = {
        **ENCODER_FIELDS,
        "classifier_dropout": "cls_dropout",
        "embedding_size": "embedding_size",
        "pooler_activation": "pooler_hidden_act",
        "convolution_size": "conv_kernel_size",
    }
    translated_fields = ("position_embedding", "mlm_head", "convolution_act", *_RELATIVE)
    defaults = {
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "pooler_activation": "gelu",
    }
    required_values = {"conv_groups": 1, "pooler_dropout": 0, "is_decoder": False, "add_cross_attention": False}
    prefix = "deberta."
    modules = {
        **embeddings("deberta."),
        "bert.embeddings.projection": ("deberta.embeddings.embed_proj",),
        "bert.relative.table": ("deberta.encoder.rel_embeddings",),
        "bert.relative.norm": ("deberta.encoder.LayerNorm",),
        "bert.encoder.layers.0.convolution.map": ("deberta.encoder.conv.conv",),
        "bert.encoder.layers.0.convolution.norm": ("deberta.encoder.conv.LayerNorm",),
        "bert.pooler.dense": ("pooler.dense",),
        "masked_lm.dense": ("cls.predictions.transform.dense",),
        "masked_lm.norm": ("cls.predictions.transform.LayerNorm",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers = "deberta.encoder.layer.{}."
    layer = {
        **LAYER,
        "attention.qkv": tuple(f"attention.self.{kind}_proj" for kind in ("query", "key", "value")),
        "attention.relative.projection": ("attention.self.pos_query_proj", "attention.self.pos_key_proj"),
    }
    decoder = ("cls.predictions.decoder.weight", "cls.predictions.bias")
    second_bias = "cls.predictions.decoder.bias"
    redundant_names = buffers("deberta.")

    def can_express(self, config: BertConfig) -> bool:
        """Without terms of distances, nothing of them is said."""
        published = BertConfig()
        return (
            super().can_express(config)
            and config.position_embedding in ("learned", "none")
            and config.mlm_head in ("bert", "deberta")
            and (bool(config.relative_terms) or all(getattr(config, n) == getattr(published, n) for n in _RELATIVE))
        )

    def read_further(self, values: Json, fields: Json) -> Json:
        """Distances, positions and the kind of masked-LM head."""
        fields = super().read_further(values, fields)
        width = fields["hidden_size"]
        for name, expected in (
            ("pooler_hidden_size", width),
            ("attention_head_size", width // fields["num_attention_heads"]),
        ):
            if (found := values.get(name, expected)) != expected:
                raise ModelError(f"config.json: found {name} {found} with hidden_size {width}, expected {expected}")
        fields["position_embedding"] = "learned" if values.get("position_biased_input", True) else "none"
        if fields.get("convolution_size", 0) > 0:
            given = values.get("conv_act", "tanh")
            fields["convolution_act"] = given if given == "tanh" else our_activation(given)
        if fields.get("embedding_size") == width:
            fields["embedding_size"] = None
        if not values.get("legacy", True):  # this head reads the words' embeddings, whatever tie_word_embeddings says
            fields |= {"mlm_head": "deberta", "tie_word_embeddings": True}
        return fields | _relative_fields(values, fields)

    def write(self, config: BertConfig) -> Json:
        """The same as their fields; a bound of distances that is the longest sequence's is said as released ones do."""
        values = super().write(config)
        if config.embedding_size is None:
            del values["embedding_size"]  # null would be a width there
        values |= {
            "legacy": config.mlm_head == "bert",
            "position_biased_input": config.position_embedding == "learned",
            "relative_attention": bool(config.relative_terms),
            "pos_att_type": _TERMS[config.relative_attention],
            "pooler_hidden_size": config.hidden_size,
            "pooler_dropout": 0,
        }
        if config.convolution_size:
            values["conv_act"] = ACTIVATIONS.get(config.convolution_act, "tanh")
        else:
            del values["conv_kernel_size"]
        if config.relative_terms:
            bounded = config.relative_distances != config.max_position_embeddings
            values |= {
                "max_relative_positions": config.relative_distances if bounded else -1,
                "position_buckets": config.relative_buckets or -1,
                "norm_rel_ebd": "layer_norm" if config.relative_norm else "none",
                "share_att_key": not config.relative_projections,
            }
        return values

    def names(self, config: BertConfig, head: str = "") -> Names:
        """Each term has a map of its own there; the masked-LM head has its second names in the second form."""
        names = super().names(config, head)
        for ours in [name for name in names if ".attention.relative." in name]:
            kinds = dict(zip(("p2c", "c2p"), names.pop(ours), strict=True))
            if config.relative_projections:
                names[ours] = tuple(kinds[term] for term in config.relative_terms)
        if config.position_embedding != "learned":
            del names["bert.embeddings.position.weight"]  # which some folders have all the same
        if config.mlm_head == "deberta":
            names |= {
                ours: tuple(Part(_renamed(part.name)) for part in parts)
                for ours, parts in names.items()
                if ours.startswith("masked_lm.")
            }
        return names

    def weight_aliases(self, names: Collection[str], config: BertConfig) -> Mapping[str, str]:
        """Released v3 models have the second names and say nothing of `legacy`; both heads compute the same."""
        if config.mlm_head == "deberta" or any(name.startswith("cls.predictions.") for name in names):
            return {}
        theirs = (
            part.name for ours, parts in self.names(config).items() if ours.startswith("masked_lm.") for part in parts
        )
        return {_renamed(name): name for name in theirs}

    def ignored_names(self, head: str) -> tuple[str, ...]:
        """What released folders have and no class of transformers reads: the detector of replaced tokens, and positions
        that are not added to the words.
        """
        detector = (f"mask_predictions.{part}" for part in ("dense", "LayerNorm", "classifier"))
        return (
            "deberta.embeddings.position_embeddings.weight",
            *(f"{module}.{kind}" for module in detector for kind in ("weight", "bias")),
        )


def _renamed(name: str) -> str:
    """The second name of a parameter of the masked-LM head."""
    module, _, kind = name.rpartition(".")
    return f"{_LEGACY.get(module, module)}.{kind}"


def _relative_fields(values: Json, fields: Json) -> Json:
    """The fields of distances.

    Raises:
        ModelError: for terms that there are not, and for terms without distances or distances without terms.
    """
    given = values.get("pos_att_type") or []
    terms = {term.strip() for term in (given.lower().split("|") if isinstance(given, str) else given)}
    if unknown := sorted(terms - {"c2p", "p2c"}):
        raise ModelError(f"config.json: found {unknown[0]!r} in pos_att_type, expected c2p, p2c or both")
    if bool(terms) != bool(values.get("relative_attention", False)):
        raise ModelError(
            f"config.json: found relative_attention {values.get('relative_attention', False)} with pos_att_type "
            f"{given!r}, expected true with c2p, p2c or both, or false with none; fix it"
        )
    if not terms:
        return {}
    distances = values.get("max_relative_positions", -1)
    return {
        "relative_attention": "both" if len(terms) == 2 else terms.pop(),
        "relative_distances": fields.get("max_position_embeddings", BertConfig.max_position_embeddings)
        if distances < 1
        else distances,
        "relative_buckets": max(0, values.get("position_buckets", -1)),
        "relative_norm": "layer_norm" in values.get("norm_rel_ebd", "none").lower(),
        "relative_projections": not values.get("share_att_key", False),
    }
