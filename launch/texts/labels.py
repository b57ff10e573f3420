"""Labels as people read them."""

import unicodedata
from collections.abc import Iterable


def looking_alike(labels: Iterable[str]) -> str | None:
    """Two of the labels that look alike, for a message; None: there are none.

    They are compared without what can't be seen: kind and number of spaces, marks of width and direction, composed
    accents, hyphens that don't break.
    """
    by_look: dict[str, str] = {}
    for label in sorted(set(labels)):
        seen = unicodedata.normalize("NFC", label).replace("\N{NON-BREAKING HYPHEN}", "\N{HYPHEN}")
        seen = "".join(letter for letter in seen if unicodedata.category(letter) != "Cf")
        seen = " ".join(seen.replace("\N{HYPHEN}", "-").split())
        if (other := by_look.setdefault(seen, label)) != label:
            return f"{ascii(other)} and {ascii(label)}"
    return None
