"""Row counts of matrix products on a CPU with AMX, where a product is compiled for each."""

from collections.abc import Mapping

import torch

# Copies of this file beside exported models are loaded with older torch too, which has no such function.
_CAPABILITIES: Mapping[str, bool] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}

# Sizes between one power of two and the next, by whether tensors are on a GPU (None: any). For AMX oneDNN compiles a
# product in 2 to 8 ms, as long as it then takes for some thousand rows, and a step has over twenty; for AVX-512 in 0.3
# ms. Batches of concatenated tokens hardly ever have the same size. Rounded up to one of few sizes, 2% larger on
# average, they meet products that are compiled already: a fine-tuning step took 0.73 of its time, a pretraining step of
# 3,600 tokens 0.93 (8 layers of 256).
_SIZES_PER_OCTAVE: dict[bool, int | None] = {False: 16 if _CAPABILITIES.get("amx_bf16") else None, True: None}


def extra_rows(count: int, on_gpu: bool) -> int:
    """How many rows to add to so many, so that the sum is one of few sizes; 0 on a GPU and without AMX."""
    sizes = _SIZES_PER_OCTAVE[on_gpu]
    if sizes is None or not count:
        return 0
    return -count % max(1, (1 << count.bit_length() - 1) // sizes)
