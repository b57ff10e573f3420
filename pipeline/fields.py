"""Dictionaries whose keys are known only when a program runs. The file imports nothing that takes time: every command's
help does with it.
"""

from typing import Any

Fields = dict[str, Any]
"""Values by name, as JSON, YAML and keyword arguments have them."""
MicroBatch = dict[str, Any]
"""Arguments of a model's forward, as loading/collate.py makes them: tensors, and numbers of the host."""
