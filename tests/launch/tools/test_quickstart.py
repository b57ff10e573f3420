"""The text of the quick start; its steps are tested in tests/end_to_end/test_chain.py."""

from pydoc_data.topics import topics

from cloze.launch.tools.quickstart import documentation


def test_the_text_is_large_enough_that_pairs_are_not_learned_by_heart():
    texts = dict(documentation())
    assert {"for", "json/__init__.py"} <= set(texts), "the language and the library"
    assert sum(map(len, texts.values())) > 3 * sum(map(len, topics.values()))
    assert not any({"test", "site-packages"} & set(name.split("/")) for name in texts)
    assert texts["json/__init__.py"].startswith("JSON (JavaScript Object Notation)")
    assert not any(">>>" in text for name, text in texts.items() if name.endswith(".py")), "prose"
