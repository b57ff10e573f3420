"""`Family`: what the folders of one family of `transformers` have of their own. Imports no torch, which takes seconds:
a config.json is read before anything else.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from cloze.model.config import BertConfig, ModelError

Json = dict[str, Any]
"""Fields of config.json."""
Modules = Mapping[str, tuple[str, ...]]
"""Modules: ours -> theirs, or several of theirs whose rows ours concatenates, in equal shares."""

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
DETECTOR = "BertForReplacedTokenDetection"
# Our class -> what its head is; others have none.
HEADS = {
    "BertForPreTraining": "masked_lm",
    "BertForMaskedLM": "masked_lm",
    "BertForSequenceClassification": "sequence",
    "BertForMultipleChoice": "choice",
    "BertForTokenClassification": "tokens",
    "BertForQuestionAnswering": "span",
}
# Fields of BertConfig that change nothing that a family's format would have to say: those of the first weights, of
# training alone, and those that take effect with other fields only.
_IRRELEVANT_FIELDS = {
    "initialization",
    "initializer_cutoff",
    "embedding_initializer_range",
    "position_initializer_range",
    "parametrization",
    "base_hidden_size",
    "base_num_layers",
    "vocab_padding_multiple",
    "embedding_dropout",
    "attention_output_dropout_prob",
    "rotary_theta",
    "local_rotary_theta",
    "global_attention_every",
    "hidden_act",
    "pooler",
    "family",
}


class Part(NamedTuple):
    """A tensor of theirs, or some of its rows, that is a part of one of ours; ours concatenates its parts' rows."""

    name: str
    rows: int = 0
    """Its number of rows; 0: an equal share of ours."""
    start: int = 0
    """The first of these rows in theirs. A tensor of theirs may be in several of ours, or twice in one, each time with
    other rows; together they are all of it.
    """


Names = dict[str, tuple[Part, ...]]
"""Parameters: ours -> theirs."""


def alike(*ends: str) -> dict[str, str]:
    """Our classes -> the ends of theirs, where both have the same: BertForMaskedLM -> ForMaskedLM."""
    return {f"Bert{end}": end for end in ends}


WITHOUT_PAIRS = {
    "BertForPreTraining": "ForMaskedLM",
    **alike(
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForMultipleChoice",
        "ForQuestionAnswering",
    ),
}
"""`Family.class_suffixes` of several families, which have no head for next sentences."""
ENCODERS_AND_CLASSIFIERS = {
    "BertForPreTraining": "ForMaskedLM",
    **alike("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
}
"""The same of families that have none for choices and spans either."""


class Family:
    """A family: its model_type(s), names of weights and of classes, and fields of config.json.

    Attributes of the class are tables; a method is overridden where a table does not suffice. A family is one file with
    one such class, and an entry of `FAMILIES`.
    """

    class_prefixes: ClassVar[Mapping[str, str]]
    """model_type -> beginning of the names of its classes."""
    named_in_config: ClassVar[bool] = True
    """Whether `BertConfig.family` says its model_type; if not, its fields tell it from all others."""
    class_suffixes: ClassVar[Mapping[str, str]]
    """Our class -> end of the name of theirs. Of two with one end, the later is what a folder is read as."""
    classes_with_pooler: ClassVar[Collection[str]] = ()
    """Those of our classes whose counterpart is never without a pooler."""
    head_poolings: ClassVar[Collection[str]] = ("pooler",)
    """Values of `HeadConfig.pooling` that their classifiers have."""

    structure: ClassVar[Mapping[str, object]] = {}
    """Fields of BertConfig -> the value that they have in this family, where that is another than BERT's. (A field that
    is neither here nor in `fields` or `translated_fields` has BERT's.)
    """
    fields: ClassVar[Mapping[str, str]]
    """Fields of BertConfig -> theirs of the same meaning."""
    aliases: ClassVar[Mapping[str, tuple[str, int]]] = {}
    """Other names that transformers reads for fields of theirs -> the field, and how many times the value under the
    other name its value is.
    """
    translated_fields: ClassVar[Collection[str]] = ()
    """Further fields of BertConfig that `read` and `write` translate."""
    defaults: ClassVar[Mapping[str, object]] = {}
    """Fields of BertConfig -> value that their configuration class has where config.json leaves them out, if it is
    another than ours.
    """
    required_values: ClassVar[Mapping[str, object]] = {}
    """Fields of theirs -> the only value that is computed here."""
    activation: ClassVar[str] = "hidden_act"
    """Their field of `hidden_act`."""
    default_activation: ClassVar[str] = "gelu"
    """Its value where config.json leaves it out."""

    prefix: ClassVar[str]
    """Of the encoder's names, which a bare encoder's lack."""
    modules: ClassVar[Modules]
    """All modules but those of the layers."""
    heads: ClassVar[Mapping[str, Modules]] = {}
    """A value of `HEADS` -> modules that have these names in a model with such a head alone."""
    layers: ClassVar[str]
    """Beginning of the names of a layer; {} is its number."""
    layer: ClassVar[Modules]
    """Modules of a layer."""
    heads_with_pooler: ClassVar[Collection[str] | None] = None
    """Values of `HEADS`, "" for no head, of classes with a pooler; None: all have one. With others it is not exported.
    """
    decoder: ClassVar[tuple[str, str]]
    """Weight and bias of the vocabulary projection."""
    redundant_names: ClassVar[Collection[str]] = ()
    """Names that repeat another parameter or hold no weight."""
    second_bias: ClassVar[str] = ""
    """The other name of the vocabulary projection's bias: the same tensor if the embeddings are tied, else only this
    one is used.
    """
    segment_weight: ClassVar[str] = ""
    """Name of the segments' embedding, in a family that is never without one."""
    sequence_weight: ClassVar[str] = ""
    """Name of a weight by which a classifier of sequences is told from all else; "": the name of the class tells."""
    null_fields: ClassVar[Collection[str]] = ()
    """Fields of theirs that are written as null: special tokens that are left to the tokenizer. Left out, they would be
    those of the family's own vocabulary.
    """

    def model_type(self, config: BertConfig) -> str | None:
        """The model_type of this family that has this configuration; None: it has none."""
        kind = config.family if self.named_in_config else next(iter(self.class_prefixes))
        if kind not in self.class_prefixes or (not self.named_in_config and config.family != "bert"):
            return None
        return kind if self.can_express(config) else None

    def can_express(self, config: BertConfig) -> bool:
        """Whether all that config.json does not say has the family's value."""
        known = {*_IRRELEVANT_FIELDS, *self.fields, *self.translated_fields} - self.structure.keys()
        return all(
            getattr(config, field.name) == self.structure.get(field.name, field.default)
            for field in dataclasses.fields(BertConfig)
            if field.name not in known
        )

    def read(self, values: Json) -> BertConfig:
        """BertConfig of a config.json.

        Raises:
            ModelError: for what is not computed here.
        """
        values = dict(values)
        for alias, (field, factor) in self.aliases.items():
            if alias in values and values.setdefault(field, factor * values[alias]) != factor * values[alias]:
                raise ModelError(
                    f"config.json: found {alias} {values[alias]!r} beside {field} {values[field]!r} with model_type "
                    f"{values['model_type']}, expected one of the two; remove the one that was not used in training"
                )
        for name, expected in self.required_values.items():
            if (found := values.get(name, expected)) != expected:
                raise ModelError(
                    f"config.json: found {name} {found!r} with model_type {values['model_type']}, expected {expected!r}"
                )
        given = {ours: values[theirs] for ours, theirs in self.fields.items() if theirs in values}
        family = {"family": values["model_type"]} if self.named_in_config else {}
        return BertConfig(**{**self.structure, **family, **self.read_further(values, {**self.defaults, **given})})

    def read_further(self, values: Json, fields: Json) -> Json:
        """All fields of BertConfig, from those that have a field of the same meaning."""
        fields["pad_token_id"] = fields.get("pad_token_id") or 0  # transformers may say null
        return fields | {"hidden_act": our_activation(values.get(self.activation, self.default_activation))}

    def write(self, config: BertConfig) -> Json:
        """The fields of a config.json."""
        values = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        return values | {self.activation: ACTIVATIONS[config.hidden_act], **dict.fromkeys(self.null_fields)}

    def class_of(self, config: BertConfig, architecture: str, pooling: str | None) -> str | None:
        """The name of their class for one of ours; None: there is none that computes the same.

        Args:
            pooling: `HeadConfig.pooling`; None: there is no head for fine-tuning.
        """
        if architecture not in self.class_suffixes or (architecture in self.classes_with_pooler and not config.pooler):
            return None
        if pooling is not None and pooling not in self.head_poolings:
            return None
        return self.class_prefixes[self.model_type(config) or ""] + self.class_suffixes[architecture]

    def names(self, config: BertConfig, head: str = "") -> Names:
        """Each of our parameters that a model of this configuration can have -> its name(s) there.

        Args:
            head: a value of HEADS, or "" for no head.
        """
        modules = {**self.modules, **self.heads.get(head, {})}
        divided: Names = {}
        for layer in range(config.num_distinct_layers):
            ours, theirs = f"bert.encoder.layers.{layer}.", self.layers.format(layer)
            modules |= {ours + key: tuple(theirs + name for name in names) for key, names in self.layer.items()}
            for key, parts in self.split_parameters(config).items():
                divided[ours + key] = tuple(part._replace(name=theirs + part.name) for part in parts)
        names = divided | {
            f"{our_module}.{kind}": tuple(Part(f"{module}.{kind}") for module in their_modules)
            for our_module, their_modules in modules.items()
            for kind in ("weight", "bias")
        }
        weight, bias = self.decoder
        names["masked_lm.decoder.bias"] = (Part(bias),)
        if not config.tie_word_embeddings:
            names["masked_lm.decoder.weight"] = (Part(weight),)
        return names

    def split_parameters(self, config: BertConfig) -> Names:
        """Parameters of a layer, by their names in it, of unequal parts or of parts in another order."""
        return {}

    def head_of(self, names: Collection[str], architecture: str) -> str:
        """The value of HEADS for a folder of theirs, by its weights and the name of its class (which may be "")."""
        if self.sequence_weight:
            return "sequence" if self.sequence_weight in names else ""
        return next(
            (HEADS[ours] for ours, end in self.class_suffixes.items() if ours in HEADS and architecture.endswith(end)),
            "",
        )

    def weight_aliases(self, names: Collection[str], config: BertConfig) -> Mapping[str, str]:
        """Other names that weights have in some folders, of these names -> those of `names`."""
        return {}

    def dropped_prefixes(self, head: str) -> tuple[str, ...]:
        """Beginnings of our names that a model with this head has no place for, and that are not exported."""
        pairs = () if "next_sentence.classifier" in self.modules else ("next_sentence.",)
        return pairs if self.heads_with_pooler is None or head in self.heads_with_pooler else (*pairs, "bert.pooler.")

    def ignored_names(self, head: str) -> tuple[str, ...]:
        """Names of theirs that folders may have and that no class reads."""
        return ()

    def pooling(self, values: Json) -> str:
        """`HeadConfig.pooling` of a config.json."""
        return "pooler"

    def head_fields(self, pooling: str) -> Json:
        """Further fields of config.json of a head with this `HeadConfig.pooling`."""
        return {}


def our_activation(name: str) -> Any:
    """Ours, one of `BertConfig.hidden_act`, for theirs."""
    if name not in THEIR_ACTIVATIONS:
        raise ModelError(f"config.json: found activation {name!r}, expected one of {', '.join(THEIR_ACTIVATIONS)}")
    return THEIR_ACTIVATIONS[name]
