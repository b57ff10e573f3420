"""Labels as people read them."""

import re
import unicodedata
from collections.abc import Iterable

# Characters without a look of their own: controls, marks of width, direction and form, fillers (Unicode's
# Default_Ignorable_Code_Point, and controls that are no spaces).
_UNSEEN = re.compile(
    "[\0-\b\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a]"
)
# Tags are seen in flags of regions alone; joiners between letters of scripts that join, and between emoji.
_TAGS = re.compile("(\U0001f3f4[\U000e0020-\U000e007f]+)|[\U000e0000-\U000e0fff]")
_JOINERS = re.compile("(?<=[\u0590-\U0010ffff])([\u200c\u200d])[\u200c\u200d]*(?=[\u0590-\U0010ffff])|[\u200c\u200d]+")
_SAME = str.maketrans("\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{MINUS SIGN}\N{BRAILLE PATTERN BLANK}", "--- ")


def looking_alike(labels: Iterable[str]) -> str | None:
    """Two of the labels that look alike, for a message; None: there are none.

    They are compared without what can't be seen: kind and number of spaces, marks of width and direction, composed
    accents, kinds of hyphens.
    """
    by_look: dict[str, str] = {}
    for label in sorted(set(labels)):
        seen = _UNSEEN.sub("", unicodedata.normalize("NFC", label).translate(_SAME))
        seen = " ".join(_JOINERS.sub(r"\1", _TAGS.sub(r"\1", seen)).split())
        if (other := by_look.setdefault(seen, label)) != label:
            return f"{ascii(other)} and {ascii(label)}"
    return None
