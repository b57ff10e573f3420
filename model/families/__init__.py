"""The families of encoders in `transformers` that are read and written in its format, a file for each."""

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.albert import Albert
from cloze.model.families.bert import Bert
from cloze.model.families.deberta import Deberta
from cloze.model.families.distilbert import DistilBert
from cloze.model.families.electra import Electra
from cloze.model.families.eurobert import EuroBert
from cloze.model.families.family import Family
from cloze.model.families.gte import Gte
from cloze.model.families.modernbert import ModernBert
from cloze.model.families.mpnet import MPNet
from cloze.model.families.nomic_bert import NomicBert
from cloze.model.families.roberta import Roberta

FAMILIES: tuple[Family, ...] = (
    Bert(),
    Electra(),
    Roberta(),
    ModernBert(),
    DistilBert(),
    Albert(),
    MPNet(),
    EuroBert(),
    NomicBert(),
    Gte(),
    Deberta(),
)
BY_TYPE = {kind: family for family in FAMILIES for kind in family.class_prefixes}
"""model_type -> family."""
OUR_CLASSES = {
    beginning + end: ours
    for family in FAMILIES
    for beginning in family.class_prefixes.values()
    for ours, end in family.class_suffixes.items()
}
"""Name of a class of theirs -> of ours."""


def family_of(config: BertConfig) -> str | None:
    """The model_type of `transformers` for this configuration; None: it has none for it."""
    return next(filter(None, (family.model_type(config) for family in FAMILIES)), None)


def family_for(config: BertConfig) -> Family:
    """The family of this configuration.

    Raises:
        ModelError: there is none.
    """
    kind = family_of(config)
    if kind is None:
        raise ModelError("model: this variant has no counterpart in transformers; it is kept in our own format")
    return BY_TYPE[kind]
