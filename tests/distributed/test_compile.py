"""Compiled layers in real runs: the same curve within rounding, and bit for bit after a kill."""

import pytest

from tests.forked import ForkedRun
from tests.launching import assert_killed_equals_whole, curve, finish, pretrain_arguments, train
from tests.synthetic import make_shards

pytestmark = pytest.mark.slow  # each start compiles for some 20 s
# For the first start, which makes the compiler's headers and ten kernels: 300 s on two busy cores of an EPYC (Zen 3).
COMPILING_SECONDS = 900

RUN = ("--train.max_steps", "24", "--checkpoint.every_steps", "6", "--model.attention_probs_dropout_prob", "0")


def test_a_compiled_run_is_the_plain_one_within_rounding_and_resumes_bit_for_bit(tmp_path):
    data = make_shards(tmp_path / "data")

    def compiled(name: str) -> list[str]:
        return pretrain_arguments(data, tmp_path / name, *RUN, "--train.compile", "true")

    train(data, tmp_path / "plain", *RUN, processes=2)
    finish(ForkedRun(compiled("compiled"), 2, compiler=True), patience_seconds=COMPILING_SECONDS)
    for ours, plain in zip(curve(tmp_path / "compiled"), curve(tmp_path / "plain"), strict=True):
        assert ours.keys() == plain.keys()
        for name in {"train/loss", "train/gradient_norm", "validation/loss"} & ours.keys():
            # Adam makes whole steps of rounding where a gradient is next to nothing, so later steps drift apart.
            assert ours[name] == pytest.approx(plain[name], rel=1e-5 if ours["step"] <= 1 else 1e-2), name
    assert_killed_equals_whole(tmp_path / "compiled", 10, compiled("killed"), 2, compiler=True)
