"""Text to shards to batches: the data floor of Cloze."""

if __name__ != "cloze.pipeline":
    raise ImportError(f"found an import of {__name__!r}, expected cloze.pipeline: under two names there would be two "
                      "of each class")
