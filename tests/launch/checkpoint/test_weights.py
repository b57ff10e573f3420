"""Which checkpoint is meant; what is read of it is compared in tests/distributed and tests/launch/training."""

import json
import shutil

import pytest

from cloze.launch.checkpoint.state import CHECKSUMS
from cloze.launch.checkpoint.weights import read_average, read_weights
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(folder):
    run, newest = folder.parent, folder / "step-00000004"
    (run / "config.yaml").write_text("{}\n")
    (newest / "state.json").write_text(json.dumps({"step": 4, "world_size": 1, "zero_stage": 0, "best_step": 2}))
    parts = {part.name: (part.stat().st_size, sha256_of(part)) for part in newest.iterdir() if part.name != CHECKSUMS}
    (newest / CHECKSUMS).write_text(json.dumps(parts))
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(UserError, match=r"no good checkpoint of step 9; the run has 1, 3, 4$"):
        read_weights(run, 9, print)
    with pytest.raises(UserError, match=r"no good checkpoint of step 2; .* --evaluation.keep_best true keeps the best"):
        read_weights(run, "best", print)
    for path in folder.glob("*/weights.pt"):
        path.unlink()
    with pytest.raises(UserError, match="found no good checkpoint under checkpoints/"):
        read_average(run, 2, None, lambda line: None, ema=False)
