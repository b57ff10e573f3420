"""Readers: input files to documents. A task is a list of pieces of files; its documents depend on the files alone."""

from collections.abc import Callable, Iterator

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.formats import CHOICES, FORMATS
from cloze.pipeline.readers import hub
from cloze.pipeline.readers.columns import Rows
from cloze.pipeline.readers.files import InputFile, Segment, changed_while_read, is_changed
from cloze.pipeline.readers.finding import find_files
from cloze.pipeline.readers.lines import Texts
from cloze.pipeline.records import Document

# Of plain text or Parquet: small inputs are divided finely, so that workers end together; large ones are not, since
# every shard is collected from every task's files.
_SEGMENT_BYTES = (4 << 20, 64 << 20)
_SEGMENTS = 64
_MOST_SEGMENTS = 1 << 19  # from 35 TB on they are larger; a store may also give any size
_MOST_BYTES = 50 * 10**12  # of a file: of an object in S3, more than a file of ext4; by a wrong size tasks have no end
_TASKS_OF_FEW_FILES = 8  # compressed files can't be entered in the middle: few of them are read in stripes
_GROUP_BYTES = 1 << 20  # of text: neighbouring small files up to this make one task
_STRIPE_BYTES = 4 << 20  # compressed size below which a file isn't divided


def plan(
    config: PrepareConfig, note: Callable[[str], None] = lambda _: None
) -> tuple[list[InputFile], list[list[Segment]]]:
    """The input files in their order, and the tasks: lists of segments of 4 to 64 MB each.

    Depends on the files alone, never on workers.

    Args:
        note: called with what is left out (source.binary_files).

    Raises:
        UserError: an input is missing or empty, or there is no such format.
    """
    files: list[InputFile] = []
    written = [folder for folder in (config.output, config.tokenizer) if folder]  # by this run, or by one before it
    for number, part in enumerate(config.all_sources):
        if part.source.format not in CHOICES:
            raise UserError(f"source.format: found {part.source.format!r}, expected one of: {', '.join(CHOICES)}")
        if "" in part.input:  # which would be the current folder
            raise UserError("input: found an empty name, expected a file, a folder or a glob")
        if part.source.format == "dataset":
            files += hub.find_datasets(part.input, number, part.source, first=len(files))
        else:
            files += find_files(part.input, number, part.source, len(files), written, note)
    if not files:
        raise UserError("input: found none, expected files, folders or globs; name some with --input")
    for file in files:
        if file.size > _MOST_BYTES:
            raise UserError(
                f"{file.name}: found a size of {file.size:,} bytes, expected at most {_MOST_BYTES:,}; look at what its "
                "disk or store says of it"
            )
    if empty := [file.name for file in files if not file.size and not file.has_rows]:
        note(f"{_names(empty)}: found no bytes, expected text; look whether it was copied whole")
    compressed = sum(file.compression is not None for file in files)
    least, most = _SEGMENT_BYTES
    plain = sum(file.size for file in files if not file.compression)
    size = max(min(most, max(least, plain // _SEGMENTS)), plain // _MOST_SEGMENTS)
    segments = []
    for file in files:
        reader: Texts | Rows = FORMATS[file.format].load()
        if isinstance(reader, Rows):
            segments += reader.segments(file, size)
        elif file.compression:
            stripes = min(-(-_TASKS_OF_FEW_FILES // compressed), -(-file.size // _STRIPE_BYTES))
            segments += [
                Segment(file, stripe, stripes, weight=file.size // stripes) for stripe in range(max(1, stripes))
            ]
        elif reader.separator is None:
            segments.append(Segment(file, 0, 1, weight=file.size))
        else:
            segments += [
                Segment(file, start, min(start + size, file.size), weight=min(size, file.size - start))
                for start in range(0, max(1, file.size), size)
            ]
    return files, _group(segments)


def _names(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more files"


def remark_on_text(files: list[InputFile]) -> str | None:
    """What is said of plain text that was taken for such by its name alone: what a document is there, and what else
    it could be. None without any.
    """
    found = [file.name for file in files if file.format == "text" and file.config.format == "auto"]
    if not found:
        return None
    return (
        f"{_names(found)}: read as plain text, in which each paragraph (what stands between blank lines) is a "
        "document; --source.format file makes one of each file, documents one of each line, lines reads a sentence a "
        "line and a document up to a blank line, text does the same without this note"
    )


def remark_on_documents(files: list[InputFile], documents: int) -> str | None:
    """What is said of `lines` without blank lines, where each file is one document: mostly each line should be one.

    Args:
        documents: number of documents that were found in all files.
    """
    if documents > len(files) or any(file.format != "lines" for file in files):
        return None
    return (
        f"source.format lines: found {documents:,} document{'s' * (documents != 1)} in all, since no blank line "
        "divides them; with --source.format documents each line is one"
    )


def _group(segments: list[Segment]) -> list[list[Segment]]:
    """Neighbouring small segments make one task, so that a million small files aren't a million tasks."""
    tasks: list[list[Segment]] = []
    weight = 0
    for segment in segments:
        size = segment.weight * (4 if segment.file.compression else 1)
        kind = (segment.file.source, segment.file.format)
        if tasks and weight + size <= _GROUP_BYTES and kind == (tasks[-1][0].file.source, tasks[-1][0].file.format):
            tasks[-1].append(segment)
            weight += size
        else:
            tasks.append([segment])
            weight = size
    return tasks


def read(task: list[Segment]) -> Iterator[Document]:
    """The documents of a task, in the order of the source.

    Raises:
        UserError: a file can't be read, or has changed meanwhile.
    """
    for segment in task:
        yield from read_segment(segment)
        if is_changed(segment.file):
            raise changed_while_read(segment.file)


def read_segment(segment: Segment, content: bytes | None = None) -> Iterator[Document]:
    """The documents of a segment.

    Args:
        content: all bytes of its file, if it is small and they were read already.
    """
    reader: Texts | Rows = FORMATS[segment.file.format].load()
    try:
        yield from reader.read(segment, content)
    except UserError as error:
        if is_changed(segment.file):  # which is why it can't be read, as a line that isn't whole
            raise changed_while_read(segment.file) from error
        raise
