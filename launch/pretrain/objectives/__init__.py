"""What `cloze pretrain` minimises: one table, one file an objective, one interface that a user's class can fill too."""

from cloze.launch.pretrain.objectives.objective import Objective, Term

__all__ = ["Objective", "Term"]
