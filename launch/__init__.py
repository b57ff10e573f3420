"""Processes, clusters and runs: the floor that meets the outside."""

if __name__ != "cloze.launch":
    raise ImportError(f"found an import of {__name__!r}, expected cloze.launch: under two names there would be two "
                      "of each class")
