"""Files of a run that are not as it has written them are refused."""

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.run import integrity, runs
from cloze.launch.run.description import write_description
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"])
def test_what_goes_out_with_a_model_is_as_the_run_has_written_it(tmp_path, name):
    """Other padding, another class, other names of special tokens: transformers would read other texts."""
    ours = tokenizer()
    config, facts = PretrainConfig(data="d", output=str(tmp_path)), {"tokenizer_fingerprint": ours.fingerprint}
    write_description(tmp_path, config, facts, {runs.TOKENIZER: ours.save}, {})
    path = integrity.own_tokenizer(tmp_path) / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"{}") + b"\n")
    with pytest.raises(UserError, match=f"{name}: found another file, expected it as the run has written it; restore"):
        integrity.own_tokenizer(tmp_path)
    if before is not None:
        path.unlink()
        with pytest.raises(UserError, match="found no (such file|tokenizer.json), expected it as the run has written"):
            integrity.own_tokenizer(tmp_path)
        path.write_bytes(before)
        assert integrity.own_tokenizer(tmp_path) == path.parent
