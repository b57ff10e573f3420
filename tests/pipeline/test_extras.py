"""What is said of a missing extra."""

import pytest

from cloze.pipeline import extras


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (
            '{"url": "file:///home/me/my%20cloze", "dir_info": {"editable": true}}',
            "pip install -e '/home/me/my cloze[serve]'",
        ),
        (
            '{"url": "file:///w/cloze_bert-0.1.0-py3-none-any.whl", "archive_info": {}}',
            "pip install 'cloze-bert[serve] @ file:///w/cloze_bert-0.1.0-py3-none-any.whl'",
        ),
        (
            '{"url": "https://host/cloze", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "pip install 'cloze-bert[serve] @ git+https://host/cloze@abc'",
        ),
        (None, "pip install 'cloze-bert[serve]'"),
    ],
)
def test_an_extra_is_added_to_what_is_installed(monkeypatch, noted, command):
    """Cloze is on no index: `pip install cloze-bert[serve]` would fail in a checkout."""
    monkeypatch.setattr(
        extras.metadata,
        "distribution",
        lambda name: type("Found", (), {"read_text": lambda self, file: {"direct_url.json": noted}[file]})(),
    )
    assert extras.how_to_install("serve") == command
