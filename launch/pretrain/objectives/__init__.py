"""The objectives of `cloze pretrain`: the interface, a table, a file for each; users may add classes."""

from cloze.launch.pretrain.objectives.objective import Objective, Term

__all__ = ["Objective", "Term"]
