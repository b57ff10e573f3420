"""The table of formats of input files: what each is, its suffixes, its reader. It imports no reader, nor Arrow."""

from dataclasses import dataclass

from cloze.pipeline.references import Entry


@dataclass(frozen=True)
class Format(Entry):
    """A format of input files; its reader is an instance of a class of `readers/lines.py` or `readers/columns.py`."""

    suffixes: tuple[str, ...] = ()
    """Endings of the names of files that are of this format where none is given."""
    splitter: str | None = None
    """What splits its documents into sentences; None: what the configuration says."""


FORMATS = {
    "text": Format("cloze.pipeline.readers.lines:PARAGRAPHS", "documents between blank lines"),
    "file": Format("cloze.pipeline.readers.lines:WHOLE_FILES", "one document per file"),
    "lines": Format(
        "cloze.pipeline.readers.lines:PARAGRAPHS",
        "one sentence per line, blank line between documents",
        splitter="lines",
    ),
    "documents": Format("cloze.pipeline.readers.lines:LINES", "one document per line"),
    "pairs": Format("cloze.pipeline.readers.lines:PAIRS", "A<tab>B per line", splitter="pairs"),
    "jsonl": Format(
        "cloze.pipeline.readers.lines:JSON_LINES", "a JSON object per line", (".jsonl", ".ndjson", ".json")
    ),
    "parquet": Format("cloze.pipeline.readers.columns:PARQUET", "rows of Parquet files", (".parquet", ".pq")),
    "dataset": Format(
        "cloze.pipeline.readers.columns:DATA_SETS",
        "names of folders of `datasets.save_to_disk` or of data sets on the hub (NAME or NAME@REVISION)",
    ),
}
# Values of source.format, each with what is said of it.
CHOICES = {"auto": "by the file's name, else text (documents, if each line is one, must be given)"} | {
    name: form.about for name, form in FORMATS.items()
}
