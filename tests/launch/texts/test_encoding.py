"""Texts in windows."""

from cloze.launch.texts.encoding import windows


def test_windows_over_the_textbook_sentence():
    assert list(windows(12, 6, 3)) == [(0, 6), (3, 9), (6, 12)]
    assert list(windows(5, 6, 3)) == [(0, 5)] and list(windows(13, 6, 3))[-1] == (9, 13)
