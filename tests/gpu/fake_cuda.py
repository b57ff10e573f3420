"""A GPU that computes nothing: `install` makes torch's CPU build believe in one, `watch` notes what is asked of it.

Both change the whole process, which is why the tests run them in one of its own (worker.py).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import traceback
import types
import weakref
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
ROOT = Path(__file__).parents[2]
_TORCH = Path(importlib.util.find_spec("torch").origin).parent


def build(folder: Path) -> Path:
    """Compile the shim against the torch that is installed; raises CalledProcessError."""
    library = folder / "libfakecuda.so"
    include = _TORCH / "include"
    subprocess.run(
        [
            "g++",
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-O0",
            SOURCE,
            "-o",
            library,
            "-I",
            include,
            "-I",
            include / "torch/csrc/api/include",
            "-L",
            _TORCH / "lib",
            "-ltorch_cpu",
            "-lc10",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return library


_BLOCK = 512  # bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class Log:
    """What was asked of the device since `clear`."""

    def __init__(self) -> None:
        self.listening = False
        self.weighing = False
        """Whether memory is counted; from before the first tensor on, if at all."""
        self.held_bytes = 0
        self._storages: weakref.WeakSet = weakref.WeakSet()
        self.clear()

    def clear(self) -> None:
        self.waits: collections.Counter = collections.Counter()
        """Host waits for all that is queued: what and where -> times."""
        self.events: list[int] = []
        """Host waits for an event: kernels of this step that were queued before it."""
        self.launches: collections.Counter = collections.Counter()
        """Kernels: operator -> times."""
        self.copies: collections.Counter = collections.Counter()
        """Copies between host and device: way -> times."""
        self.collectives: list[tuple[str, str, int]] = []
        """(operator, dtype, bytes) of each, in order."""
        self.queued: list[int] = []
        """Kernels that were queued before each collective."""
        self.misplaced: collections.Counter = collections.Counter()
        """Operators that were given tensors of both devices, and collectives that were given the host's."""
        self.peak_bytes = self.held_bytes
        """The most that tensors on the device have held at once."""

    def weigh(self, tensor) -> None:
        """Count a tensor's memory, once for all that share it, until it is freed; in the allocator's blocks."""
        storage = tensor.untyped_storage()
        if not tensor.is_cuda or storage in self._storages:
            return
        self._storages.add(storage)
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.held_bytes -= size

    def wait(self, what: str) -> None:
        if self.listening:
            self.waits[f"{what} at {_place()}"] += 1


LOG = Log()


def _place() -> str:
    """`file:function` of the innermost frame that is ours or DeepSpeed's; lines would change with every edit."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "deepspeed" in path.parts:
            path = Path(*path.parts[path.parts.index("deepspeed") :])
        elif path.is_relative_to(ROOT) and not {"tests", "site-packages"} & set(path.relative_to(ROOT).parts):
            path = path.relative_to(ROOT)
        else:
            continue
        if path.parts[:2] not in (("deepspeed", "accelerator"), ("deepspeed", "comm")) and path.name != "nvtx.py":
            return f"{path}:{frame.name}"
    return "?"


class _Stream:
    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *_, **__) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream) -> None: ...
    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.wait("stream.synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...


class _Event:
    def __init__(self, *_, **__) -> None:
        self.log, self.queued = None, 0

    def record(self, *_) -> None:
        self.log, self.queued = LOG.launches, LOG.launches.total()

    def wait(self, *_) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if LOG.listening:  # an event of an earlier step has nothing of this one before it
            LOG.events.append(self.queued if self.log is LOG.launches else 0)

    def elapsed_time(self, _) -> float:
        return 1.0


def install(library: Path) -> None:
    """Make this process's torch believe in one GPU. To be called before anything that asks for one is imported."""
    ctypes.CDLL(str(_TORCH / "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    import torch
    import torch.cuda.nvtx
    import torch.utils._foreach_utils
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    cuda, stream = torch.cuda, _Stream()
    name = "NVIDIA H100 80GB HBM3"
    facts = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": name,
        "is_initialized": True,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (79 << 30, 80 << 30),
        "current_stream": stream,
        "default_stream": stream,
        "initial_seed": 0,
        "memory_stats": {},
        "get_device_properties": types.SimpleNamespace(
            total_memory=80 << 30, multi_processor_count=132, name=name, major=9, minor=0
        ),
    }
    facts |= dict.fromkeys(
        (f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved", "cached")), 0
    )
    for function, value in facts.items():
        setattr(cuda, function, _answering(value))
    for function in (
        "set_device",
        "_lazy_init",
        "empty_cache",
        "manual_seed_all",
        "manual_seed",
        "set_rng_state",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
    ):
        setattr(cuda, function, _answering(None))
    cuda.get_rng_state = lambda *_, **__: torch.empty(16, dtype=torch.uint8, device="cpu")
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *_: LOG.wait("cuda.synchronize")
    cuda.default_generators = (
        types.SimpleNamespace(
            initial_seed=_answering(0),
            get_offset=_answering(0),
            manual_seed=_answering(None),
            set_offset=_answering(None),
        ),
    )
    cuda.nccl = types.SimpleNamespace(version=lambda: (2, 28, 0))
    cuda.amp.common.amp_definitely_not_available = lambda: False
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _answering(None), _answering(None)
    torch.Tensor.record_stream = _answering(None)
    torch.Tensor.pin_memory = _pin
    torch.Tensor.is_pinned = lambda tensor, *_: getattr(tensor, "pinned", False)
    torch.nn.Module._apply = _apply
    # torch takes its kernels for lists of tensors for plain ones only, which fake ones stand for.
    torch.utils._foreach_utils._foreach_supported_types.append(FakeTensor)
    FakeTensorMode.avoid_device_init = property(lambda _: True)


def _answering(value):
    return lambda *_, **__: value  # a new function each time: torch.compile's tables take none twice


def _pin(tensor, *_):
    tensor = tensor.detach()
    tensor.pinned = True
    return tensor


def _apply(module, function, recurse=True):
    """`Module._apply` for fake tensors, whose device is for good: what moves is a new parameter, a tied one once."""
    import torch

    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            data = function(parameter)
        if data.device == parameter.device:
            parameter.data = data  # optimizers hold this object
            continue
        if not hasattr(parameter, "moved"):
            parameter.moved = torch.nn.Parameter(data, parameter.requires_grad)
        module._parameters[name] = parameter.moved
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


# Operators that make tensors of another shape or none at all, and launch nothing.
_VIEWS = set(
    """_has_compatible_shallow_copy_type _reshape_alias _unsafe_view alias as_strided chunk detach device empty
    empty_like empty_strided expand is_contiguous is_pinned is_same_size layout lift lift_fresh narrow new_empty
    new_empty_strided permute record_stream reshape select slice split split_with_sizes squeeze sym_numel sym_size
    sym_storage_offset sym_stride t transpose unbind unflatten unsqueeze view view_as""".split()
)
# Operators whose result's shape or value the host must know.
_WAITING = set(
    """_unique2 allclose bincount equal is_nonzero masked_select nonzero repeat_interleave
    unique_consecutive unique_dim""".split()
)
_COPIES = "_to_copy", "copy_"


def watch(answer: float = 0.0):
    """A dispatch mode that fills LOG. A read of a number from the device gives `answer`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def tensors(values) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = function.overloadpacket.__name__
            if name == "_local_scalar_dense":
                if args[0].is_cuda:
                    LOG.wait("item")
                kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
                return kind(answer)
            result = function(*args, **kwargs)
            if kwargs.get("pin_memory"):
                result.pinned = True
            if LOG.weighing:
                for tensor in tensors(result):
                    LOG.weigh(tensor)
            if not LOG.listening:
                return result
            given, made = tensors((args, kwargs)), tensors(result)
            if function.namespace == "c10d":
                self.note_collective(name, given)
                return result
            if name in _COPIES:
                self.note_copy(name, args, kwargs, given, made)
            elif len({tensor.device for tensor in given + made if tensor.dim() or tensor.is_cuda}) > 1:
                LOG.misplaced[name] += 1
            on_device = any(tensor.is_cuda for tensor in given + made)
            if on_device and name in _WAITING:
                LOG.wait(name)
            if on_device and name not in _VIEWS:
                LOG.launches[name] += 1
            return result

        @staticmethod
        def note_collective(name: str, given: list[torch.Tensor]) -> None:
            largest = max(given, key=lambda tensor: tensor.numel() * tensor.element_size(), default=None)
            if largest is None:
                return
            if not largest.is_cuda:
                LOG.misplaced[name] += 1
            dtype = str(largest.dtype).removeprefix("torch.")
            LOG.queued.append(LOG.launches.total())
            LOG.collectives.append((name.strip("_"), dtype, largest.numel() * largest.element_size()))

        @staticmethod
        def note_copy(name: str, args, kwargs: dict, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
            target, source = (given[0], given[1]) if name == "copy_" else (made[0], given[0])
            if target.device == source.device:
                return
            at_once = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            host, way = target if source.is_cuda else source, f"{source.device.type} to {target.device.type}"
            LOG.copies[way] += 1
            if at_once or not getattr(host, "pinned", False):  # from pageable memory the driver waits all the same
                LOG.wait(f"{'copy' if at_once else 'copy of pageable memory'} from {way}")

    return Watch()


def on_the_host(function):
    """`function` with real tensors, as if there were neither a fake device nor a watch."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
