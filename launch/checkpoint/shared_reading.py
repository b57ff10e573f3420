"""Content that every rank needs, read by one of them: no disk has to give the same file a thousand times.

Rank 0 sends the content without the values of its tensors, as a small file, and then the values in pieces. On GPUs they
go from memory to memory, by NCCL.
"""

import io
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.writing import replace_tensors
from cloze.launch.system import distributed
from cloze.pipeline.fields import Fields

_PIECE_BYTES = 64 << 20  # sent at once; the device needs as much free memory


def read_once(read: Callable[[], Fields], where: object, device: torch.device) -> Fields:
    """What `read` returns on rank 0, on every rank. Collective.

    Args:
        read: returns nested dicts, lists and tuples of tensors on the host and of plain values; called on rank 0 only.
        where: what is read, for the message of the other ranks.

    Returns:
        on the other ranks a copy with contiguous tensors; what is one tensor under two names is one there, too.

    Raises:
        UserError: rank 0 could not read it.
    """
    rank, world_size = distributed.place()
    if world_size == 1:
        return read()
    content: Fields = {}
    skeleton = b""
    with distributed.together("read what all processes need", where, device):
        if rank == 0:
            content = read()
            skeleton = _without_values(content)
    size = distributed.from_main(len(skeleton), device)
    sent = torch.frombuffer(bytearray(skeleton or size), dtype=torch.uint8)
    _send([sent], rank > 0, device)
    if rank:
        content = _with_room(load_pickled(io.BytesIO(sent.numpy().tobytes())))
    _send([_bytes(tensor) for tensor in _tensors(content)], rank > 0, device)
    return content


def _tensors(content: object) -> list[Tensor]:
    """The tensors of the content, each once, in the order of a walk through it."""
    filled: dict[int, Tensor] = {}
    replace_tensors(content, lambda tensor: filled.setdefault(id(tensor), tensor))
    return list(filled.values())


def _without_values(content: object) -> bytes:
    """The content as a file of torch.save, with the shapes of its tensors but not their values."""
    empty = {id(tensor): tensor.detach().to("meta") for tensor in _tensors(content)}
    file = io.BytesIO()
    torch.save(replace_tensors(content, lambda tensor: empty[id(tensor)]), file)
    return file.getvalue()


def _with_room(skeleton: Fields) -> Fields:
    """Allocate memory on the host for each tensor of a received content."""
    room = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _tensors(skeleton)}
    return replace_tensors(skeleton, lambda tensor: room[id(tensor)])


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: a view of a contiguous tensor, else a copy. Only contiguous tensors are written to."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _send(tensors: list[Tensor], receives: bool, device: torch.device) -> None:
    """Give every rank rank 0's bytes: uint8 (N,) each, of the same sizes on all ranks, written in place. Collective."""
    for pieces in _packed(tensors):
        sizes = [len(each) for each in pieces]
        if receives:
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        else:
            packed = torch.cat(pieces).to(device)
        distributed.broadcast_from_main(packed)
        if receives:
            for piece, values in zip(pieces, packed.cpu().split(sizes), strict=True):
                piece.copy_(values)


def _packed(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parts of the tensors, at most _PIECE_BYTES together."""
    pieces: list[Tensor] = []
    room = _PIECE_BYTES
    for tensor in tensors:
        while len(tensor):
            pieces.append(tensor[:room])
            tensor = tensor[room:]
            room -= len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], _PIECE_BYTES
    if pieces:
        yield pieces
