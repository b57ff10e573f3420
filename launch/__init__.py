"""Everything outside the model and the data: processes, clusters, DeepSpeed, runs, commands, the network."""

if __name__ != "cloze.launch":
    raise ImportError(
        f"found an import of {__name__!r}, expected cloze.launch: under two names each class would exist twice"
    )
