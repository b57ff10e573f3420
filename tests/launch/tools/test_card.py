"""The card of an exported model."""

from cloze.launch.tools.card import _without_paths


def test_a_card_names_no_folder_of_options_that_are_not_ours():
    assert _without_paths({"teacher": "/home/me/teacher", "soft": 5.0, "more": ["a/b", "word"]}) == {
        "teacher": None,
        "soft": 5.0,
        "more": [None, "word"],
    }
