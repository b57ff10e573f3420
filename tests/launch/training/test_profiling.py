"""The profiler of a run."""

import warnings
from types import SimpleNamespace

from cloze.launch.training.profiling import start_quietly


def test_a_profiler_of_one_cycle_says_nothing_of_others(recwarn):
    """torch 2.12 warns of what a second cycle forgets whenever a first one begins."""

    def start():
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
        warnings.warn("Profiler won't be using warmup", stacklevel=2)

    start_quietly(SimpleNamespace(start=start))
    assert [str(each.message) for each in recwarn] == ["Profiler won't be using warmup"]
