"""Rates of matrix products on this machine."""

import torch

from cloze.launch.system import devices


def test_a_busy_moment_does_not_lower_the_peak(monkeypatch):
    """Most trials meet another process; the one that did not counts, whenever it came."""
    monkeypatch.setattr(devices, "_SECONDS", 0.5)
    monkeypatch.setattr(devices, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(devices, "_SIZES", {"cpu": (8,)})
    trials = {torch.float32: iter([1e9, 1e9, 1e9, 7e9]), torch.bfloat16: iter([3e9])}
    monkeypatch.setattr(devices, "_rate", lambda matrix: (next(trials[matrix.dtype], 2e9), 2e9))
    found = devices.measure_flops(torch.device("cpu"), torch.float32, torch.bfloat16)
    assert found == {torch.float32: 7e9, torch.bfloat16: 3e9}


def test_where_a_product_takes_too_long_no_larger_one_is_tried(monkeypatch):
    """A processor without products of bf16 computes them at a GFLOP/s: a size more is eight times the time."""
    monkeypatch.setattr(devices, "_SIZES", {"cpu": (8, 16)})
    tried = []
    monkeypatch.setattr(devices, "_PAUSE_SECONDS", 0.001)
    fastest = iter(())
    monkeypatch.setattr(devices, "_rate", lambda matrix: tried.append(len(matrix)) or (1e3, next(fastest, 1e3)))
    for seconds, sizes, rates in (
        (0.1, [8, 8], []),  # one of 16 would take 8 s
        (0.5, [8, 8, 8, 16], [1e3, 1e3, 1e9]),  # the first ones met another process
    ):
        monkeypatch.setattr(devices, "_SECONDS", seconds)
        tried.clear()
        fastest = iter(rates)
        devices.measure_flops(torch.device("cpu"), torch.bfloat16)
        assert tried[: len(sizes)] == sizes and (16 in tried) == (16 in sizes)


def test_a_higher_measurement_replaces_what_is_kept_and_a_lower_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu, fp32, bf16 = torch.device("cpu"), torch.float32, torch.bfloat16
    assert devices.keep_measured(cpu, {fp32: 2e9, bf16: 4e9}) == {fp32: 2e9, bf16: 4e9}
    assert devices.keep_measured(cpu, {fp32: 1e9, bf16: 5e9}) == {fp32: 2e9, bf16: 5e9}
    assert (devices.peak_flops(cpu, fp32), devices.peak_flops(cpu, bf16)) == (2e9, 5e9)


def test_a_cpu_is_slow_in_bf16_where_its_products_are(monkeypatch):
    """By the fastest of several trials of each; a GPU has none."""
    seconds = iter([9.0, 0.3, 0.5, 0.4, 0.6, 7.0, 0.2, 0.1, 0.3, 0.2])  # bf16, then fp32; the first chooses its kernel
    now = 0.0

    def clock():
        nonlocal now, ending
        now += next(seconds) if ending else 0.0
        ending = not ending
        return now

    ending = False
    monkeypatch.setattr(devices.time, "perf_counter", clock)
    assert abs(devices.bf16_slowdown(torch.device("cpu")) - 3.0) < 1e-6
    assert devices.bf16_slowdown(torch.device("cuda")) == 0 < devices.SLOW_BF16
