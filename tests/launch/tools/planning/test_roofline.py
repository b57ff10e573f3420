"""How long kernels take: what is fused, what fills few processors."""

import pytest

from cloze.launch.tools.planning.machines import find_machine
from cloze.launch.tools.planning.roofline import fuse, product_efficiency
from cloze.launch.tools.planning.trace import Kernel, Trace


def kernel(index_of: str, reads=(), writes=(), kind="pointwise", in_layer=True) -> Kernel:
    return Kernel(
        index_of,
        kind,
        reads=tuple((number, 100) for number in reads),
        writes=tuple((number, 100) for number in writes),
        in_layer=in_layer,
    )


def test_fused_kernels_read_what_comes_from_outside_and_write_what_is_used_outside():
    """x -> a -> b -> product -> c, and d of b alone: a has no other reader, b has, c and d are results."""
    kernels = [
        kernel("first", [1], [2]),
        kernel("second", [2, 3], [4]),
        kernel("mm", [4, 5], [6], "product"),
        kernel("third", [6, 4], [7]),
        kernel("late", [4], [8]),
    ]
    before, product, after = fuse(Trace(kernels))
    assert dict(before.reads) == {1: 100, 3: 100} and dict(before.writes) == {4: 100, 8: 100} and product == kernels[2]
    assert dict(after.reads) == {6: 100, 4: 100} and dict(after.writes) == {7: 100}


def test_what_is_no_layers_stays_as_it_is():
    """Embeddings, heads and sums of gradients are not compiled."""
    kernels = [
        kernel("first", [1], [2], in_layer=False),
        kernel("second", [2], [3], in_layer=False),
        kernel("third", [3], [4]),
        kernel("fourth", [4], [5]),
    ]
    assert [each.name for each in fuse(Trace(kernels))] == ["first", "second", "fused"]


def test_products_of_few_tiles_fill_few_processors():
    machine = find_machine("h100")
    best = product_efficiency(machine, (1, 128 * 132, 1 << 20, 256))
    assert best == pytest.approx(machine.best_product, rel=1e-3)
    assert product_efficiency(machine, (1, 128, 256, 256)) < best / 100
    assert product_efficiency(machine, (1, 128 * 133, 1 << 20, 256)) == pytest.approx(best * 133 / 264, rel=1e-3)
