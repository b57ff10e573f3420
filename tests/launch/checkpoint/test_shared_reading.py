"""Content that rank 0 reads and sends, in a world of 1,024 ranks whose messages are recorded and played back."""

import contextlib
import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from cloze.launch.checkpoint import shared_reading
from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.shared_reading import read_once
from cloze.launch.system import distributed
from cloze.pipeline.errors import UserError

CPU = torch.device("cpu")
PIECE_BYTES = 1000


class World:
    """What rank 0 broadcasts, for the ranks after it: numbers and tensors in order."""

    def __init__(self, monkeypatch) -> None:
        self.sent: list = []
        self._rank, self._place = 0, 0
        monkeypatch.setattr(shared_reading, "_PIECE_BYTES", PIECE_BYTES)
        monkeypatch.setattr(distributed, "place", lambda: (self._rank, 1024))
        monkeypatch.setattr(distributed, "together", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(distributed, "from_main", lambda number, _: self._pass(number))
        monkeypatch.setattr(distributed, "broadcast_from_main", lambda values: values.copy_(self._pass(values.clone())))

    def become(self, rank: int) -> None:
        self._rank, self._place = rank, 0

    def _pass(self, value):
        if self._rank == 0:
            self.sent.append(value)
        self._place += 1
        return self.sent[self._place - 1]


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def same(left: object, right: object) -> bool:
    """Whether nested content has the same classes, formats and bits."""
    if isinstance(left, torch.Tensor):
        alike = left.shape == right.shape and left.dtype == right.dtype and type(left) is type(right)
        return alike and left.contiguous().view(-1).view(torch.uint8).equal(
            right.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(left, dict):
        return type(left) is type(right) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return vars(left) == vars(right) if isinstance(left, LossScaler) else left == right


def test_a_file_is_read_by_one_rank_and_is_the_same_on_all(world, tmp_path):
    torch.manual_seed(1)
    tied, path = torch.randn(40, 30), tmp_path / "content.pt"
    module = OrderedDict(tied=tied, decoder=tied, turned=torch.randn(7, 5).t(), empty=torch.empty(0, 3))
    module["half"], module["yes"], module["nan"] = (
        torch.randn(333).bfloat16(),
        torch.tensor([True]),
        torch.tensor([-0.0]),
    )
    module["nan"][0] = math.nan
    states = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(1001)}, 5: {}}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.98), "params": [0, 5]}]
    scaler = LossScaler(scale=8.0)
    torch.save({"module": module, "optimizer": {"state": states, "param_groups": groups}, "scaler": scaler}, path)
    opened = []

    def read() -> dict:
        opened.append(path)
        return load_pickled(path)

    first = read_once(read, path, CPU)
    for rank in (1, 1023):
        world.become(rank)
        found = read_once(read, path, CPU)
        assert same(found, first) and same(found, load_pickled(path))
        assert found["module"]["tied"] is found["module"]["decoder"]
        for tensor in found["module"].values():
            tensor.fill_(0)  # room of its own: nothing is shared with what the next rank gets
    assert len(opened) == 1

    sent = [len(each) for each in world.sent if isinstance(each, torch.Tensor)]
    assert max(sent) == PIECE_BYTES
    values = sum(each.numel() * each.element_size() for each in [*list(module.values())[1:], *states[0].values()])
    skeleton = world.sent[0]
    assert sum(sent) == skeleton + values, "a tensor under two names once"
    assert len(sent) == math.ceil(skeleton / PIECE_BYTES) + math.ceil(values / PIECE_BYTES)


def test_what_rank_0_cannot_read_is_said(world, tmp_path):
    path = tmp_path / "content.pt"
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="content.pt: found something other than tensors or a damaged file"):
        read_once(partial(load_pickled, path), path, CPU)
    assert not world.sent
