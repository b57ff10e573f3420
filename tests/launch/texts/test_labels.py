"""Labels that look alike."""

import pytest

from cloze.launch.texts.labels import looking_alike


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a "), ("New York", "New\u00a0York"), ("a b", "a  b"), ("a b", "a\tb"), ("co-op", "co\u2011op")]
    + [("co-op", "co\u2010op"), ("caf\u00e9", "cafe\u0301"), ("a", "a\u200b"), ("", " ")]
    + [("good", "good\u200c"), ("ab", "a\u200db"), ("\u0645\u062b\u0628\u062a", "\u0645\u062b\u0628\u062a\u200c")]
    + [("\u2764", "\u2764\ufe0f"), ("-1", "\u22121"), ("a", "a\0"), ("a b", "a\u2800b"), ("a", "a\U000e0020\U000e0041")]
    + [
        ("\u6b63\u9762", "\u6b63\u200d\u9762"),
        ("\u062f\u0627\u062f", "\u062f\u200c\u0627\u062f"),
        ("\u05d8\u05d5", "\u05d8\u200c\u05d5"),
    ]
    + [("\xb5g", "\u03bcg"), ("\xe9", "e\u200b\u0301")]
    + [("a", "a" + mark) for mark in "\ufe00\u034f\u180e\u3164\u115f\u206a\ufff9\u00ad"],
)
def test_what_cant_be_seen_makes_no_difference(one, other):
    assert set(looking_alike(["c", other, "d", one]).split(" and ")) == {ascii(one), ascii(other)}


def test_what_can_be_seen_makes_one():
    """Also joiners, which make other letters and other emoji, and tags, which make flags of regions."""
    flags = [
        "\U0001f3f4" + "".join(chr(0xE0000 + ord(letter)) for letter in f"{name}\x7f") for name in ("gbeng", "gbsct")
    ]
    assert looking_alike(flags) is None
    for one in (
        "\u06ab\u200c\u0647",
        "\u0645\u06cc\u064e\u200c\u0631",
        "\u0647\u200d",
        "\u0cb0\u200d\u0ccd\u0c95",
        "\u0920\u094d\u200c\u0920",
    ):
        assert looking_alike([one, one.replace("\u200c", "").replace("\u200d", "")]) is None
    joined = ["\u0646\u0645\u06cc\u200c\u0634\u0648\u062f", "\u0646\u0645\u06cc\u0634\u0648\u062f"]
    assert looking_alike([*joined, "\U0001f468\u200d\U0001f469", "\U0001f468\U0001f469"]) is None
    assert (
        looking_alike(["a", "A", "a-b", "a\u2013b", "ab", "a b", "\u0430", "1", "01", "1.0", "\u00b2", "2", "a", ""])
        is None
    )


def test_long_labels_are_compared_in_no_time():
    """A hostile one of nothing but marks, which Unicode composes in the square of their number."""
    marks = "a" + "\u0301\u0316" * 500_000 + "\u200c"
    assert looking_alike([marks, marks[:-1], "a"]) is None
