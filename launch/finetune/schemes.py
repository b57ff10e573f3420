"""Tagging schemes of entities. All are read as IOB2, which `predict tag` and `transformers` group into entities.

IOB1 (Ramshaw and Marcus 1995; CoNLL-2003 as it is distributed), IOB2, IOE, IOBES (or BIOES), BILOU, BMES (or BMEWO).
"""

from itertools import pairwise

OUTSIDE = "O"
_KIND = "entity"  # the kind of tags without a kind, such as B, I, O
_FIRST, _LAST = "BSUW", "ESUWL"  # prefixes of the first and of the last word of an entity
PREFIXES = "BIEMLSUW"

Parts = tuple[str, str]
"""Prefix and kind of a tag."""


def split_tag(tag: str) -> Parts | None:
    """Prefix and kind of a tag; None if it belongs to no scheme.

    >>> split_tag("B-PER"), split_tag("O"), split_tag("M"), split_tag("PER")
    (('B', 'PER'), ('O', ''), ('M', 'entity'), None)
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return None if prefix not in [*PREFIXES] or (dash and not kind) else (prefix, kind or _KIND)


def to_iob2(sentences: list[list[Parts]]) -> tuple[list[list[str]], str]:
    """The same entities in IOB2, and the scheme of the given tags. Errors of an IOB2 file are kept."""
    pairs = [list(pairwise([(OUTSIDE, ""), *parts])) for parts in sentences]
    scheme = _find_scheme([pair for sentence in pairs for pair in sentence])
    return [[_tag(before, part, scheme) for before, part in sentence] for sentence in pairs], scheme


def _tag(before: Parts, part: Parts, scheme: str) -> str:
    (prefix, kind), (prefix_before, kind_before) = part, before
    if prefix == OUTSIDE:
        return OUTSIDE
    if scheme != "IOB2":
        begins = prefix in _FIRST or prefix_before in _LAST or kind != kind_before
        prefix = "B" if begins else "I"
    return f"{prefix}-{kind}"


def _find_scheme(pairs: list[tuple[Parts, Parts]]) -> str:
    prefixes = {prefix for _, (prefix, _) in pairs}
    if prefixes & set("MW"):
        return "BMES"
    if prefixes & set("LU"):
        return "BILOU"
    if prefixes & set("ES"):
        return "IOBES" if prefixes & set("BS") else "IOE"
    # In IOB2 no entity begins with I-; in IOB1 only one directly after another of its kind begins with B-. Since files
    # have errors, the scheme with fewer contradicting words is chosen.
    begins = [prefix for (_, before), (prefix, kind) in pairs if kind and kind != before]
    return "IOB1" if begins.count("I") > begins.count("B") else "IOB2"
