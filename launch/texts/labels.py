"""Labels as people read them."""

import functools
import re
import unicodedata
from collections.abc import Iterable

# Characters without a look of their own: controls, marks of width, direction and form, fillers (Unicode's
# Default_Ignorable_Code_Point, and controls that are no spaces).
_UNSEEN = re.compile(
    "[\0-\b\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a]"
)
# Of a label that people read; longer ones are compared as they are: marks are composed in the square of their number.
_MOST_LETTERS = 1000
# Tags are seen in flags of regions alone.
_TAGS = re.compile("(\U0001f3f4[\U000e0020-\U000e007f]+)|[\U000e0000-\U000e0fff]")
_NON_JOINER, _JOINER = "\u200c\u200d"
_VIRAMA = 9  # its canonical combining class; behind it both joiners choose the form of letters
_SAME = str.maketrans(
    "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{MINUS SIGN}\N{BRAILLE PATTERN BLANK}\N{MICRO SIGN}",
    "--- \N{GREEK SMALL LETTER MU}",
)


def looking_alike(labels: Iterable[str]) -> str | None:
    """Two of the labels that look alike, for a message; None: there are none.

    They are compared without what can't be seen: kind and number of spaces, marks of width and direction, composed
    accents, kinds of hyphens, the micro sign of keyboards.
    """
    by_look: dict[str, str] = {}
    for label in sorted(set(labels)):
        if (other := by_look.setdefault(_look(label), label)) != label:
            return f"{ascii(other)} and {ascii(label)}"
    return None


def _look(label: str) -> str:
    """The label without what can't be seen."""
    if len(label) > _MOST_LETTERS:
        return label
    seen = _UNSEEN.sub("", unicodedata.normalize("NFC", label).translate(_SAME))
    return unicodedata.normalize("NFC", " ".join(_without_joiners(_TAGS.sub(r"\1", seen)).split()))


def _without_joiners(text: str) -> str:
    """The text without joiners and non-joiners that can't be seen: between other letters than those that join."""
    if not {_NON_JOINER, _JOINER} & {*text}:
        return text
    seen, base = "", ""  # the last letter that is no mark
    for number, letter in enumerate(text):
        before, behind = seen[-1:], text[number + 1 : number + 2]
        joins = _joins(base)
        if letter == _NON_JOINER:
            shown = joins and _is_joining(behind) or _is_virama(before)
        elif letter == _JOINER:
            of_signs = _is_virama(before) or _is_virama(behind) or _is_emoji(before) and _is_emoji(behind)
            shown = of_signs or joins and not _is_joining(behind)
        if letter not in (_NON_JOINER, _JOINER) or shown:
            seen += letter
            base = base if unicodedata.combining(letter) else letter
    return seen


def _is_joining(letter: str) -> bool:
    """Whether a letter is of a script whose letters join."""
    scripts = ((0x600, 0x860), (0x870, 0x900), (0x1800, 0x18B0), (0x1E900, 0x1E960))  # Arabic to N'Ko, Mongolian, Adlam
    of_script = bool(letter) and any(first <= ord(letter) < last for first, last in scripts)
    return (
        of_script and unicodedata.category(letter) in ("Lo", "Lm", "Lu", "Ll") and letter != "\N{ARABIC LETTER HAMZA}"
    )


def _joins(letter: str) -> bool:
    """Whether a letter joins to the one behind it."""
    return _is_joining(letter) and letter not in _forms("<final>") - _forms("<initial>")


@functools.cache
def _forms(kind: str) -> set[str]:
    """The letters of Arabic script with such a form: those with a final one alone join to the letter before them."""
    forms = (unicodedata.decomposition(chr(number)).split() for number in range(0xFB50, 0xFEFF))
    return {chr(int(form[1], 16)) for form in forms if form[:1] == [kind] and len(form) == 2}


def _is_virama(letter: str) -> bool:
    return bool(letter) and unicodedata.combining(letter) == _VIRAMA


def _is_emoji(letter: str) -> bool:
    return bool(letter) and unicodedata.category(letter) in ("So", "Sk")
