"""Settings of glibc's memory allocator: keep freed memory, share one heap among threads."""

import ctypes
import platform

# Parameters of glibc's mallopt (malloc.h), and values above the largest array or tensor on a CPU.
_MALLOPT = {-3: 1 << 30, -1: (1 << 31) - 1, -2: 1 << 26}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD; bytes
_ARENA_MAX = -8


def keep_freed_pages() -> bool:
    """Have glibc keep memory that arrays and tensors free, for later ones.

    By default it returns large blocks to the kernel, which must clear them again for the next allocation: a seventh of
    the time of preparing data, some 3% to 5% of a training step on a CPU.

    Returns:
        Whether it does (not with another C library).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all([library.mallopt(parameter, value) for parameter, value in _MALLOPT.items()])


def share_one_arena() -> bool:
    """Have all threads allocate from one heap of glibc; call it before they start.

    By default each thread has its own heap, whose freed memory other threads cannot use: a process whose threads take
    turns with large objects holds a multiple of the memory.

    Returns:
        Whether they do.
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, 1))
