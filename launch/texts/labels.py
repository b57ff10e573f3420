"""Labels as people read them."""

import re
import unicodedata
from collections.abc import Iterable

# Spaces without width, soft hyphens, marks of direction, operators, the mark of a byte order. Joiners and tags can be
# seen: they make one emoji of several, and other letters in Persian.
_UNSEEN = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")


def looking_alike(labels: Iterable[str]) -> str | None:
    """Two of the labels that look alike, for a message; None: there are none.

    They are compared without what can't be seen: kind and number of spaces, marks of width and direction, composed
    accents, hyphens that don't break.
    """
    by_look: dict[str, str] = {}
    for label in sorted(set(labels)):
        seen = unicodedata.normalize("NFC", label).replace("\N{NON-BREAKING HYPHEN}", "\N{HYPHEN}")
        seen = _UNSEEN.sub("", seen)
        seen = " ".join(seen.replace("\N{HYPHEN}", "-").split())
        if (other := by_look.setdefault(seen, label)) != label:
            return f"{ascii(other)} and {ascii(label)}"
    return None
