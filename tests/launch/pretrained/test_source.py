"""Where the first weights come from."""

from pathlib import Path

import pytest

from cloze.launch.commands import parse
from cloze.launch.pretrained.source import find_source
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError


def test_a_shape_for_fine_tuning_goes_by_its_name(tmp_path, monkeypatch):
    """A run, a folder or a file of that name goes first."""
    monkeypatch.chdir(tmp_path)
    found = parse("finetune", ["sst2", "--model", "mini", "--train", "t", "--validation", "v", "--output", "o"])
    with pytest.raises(UserError, match=r"tokenizer: found none, .*: mini is a shape without a vocabulary"):
        find_source(found)
    Path("mini").mkdir()
    with pytest.raises((UserError, ModelError), match="mini"):
        find_source(found)
