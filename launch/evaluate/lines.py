"""Suite `lines`: (pseudo-)log-likelihood per character of held-out text, comparable between different vocabularies."""

import re

from cloze.launch.evaluate.likelihood import (
    Hidden,
    ScoringProgress,
    check_finite,
    log_likelihoods,
    num_tokens,
    warn_of_longer,
)
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import Console
from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.readers import plan, read


def read_lines(data: str, every_nth: int) -> list[str]:
    """Non-empty lines, without surrounding white space, of all documents in the source's order.

    Raises:
        UserError: there is no such file, or it is not text.
    """
    try:
        _, tasks = plan(PrepareConfig(input=[data]))
        texts = (document.text.decode("utf-8") for task in tasks for document in read(task))
        lines = (line.strip() for text in texts for line in text.split("\n"))
        chosen = [line for line in lines if line][::every_nth]
    except UserError as error:  # the message names fields and options of `cloze prepare`
        said = re.sub("^input: ", "data: ", str(error))
        left_out = " (options of `cloze prepare`: make a file of plain text)" if re.search(r"\s--\w", said) else ""
        raise UserError(said + left_out) from error
    if not chosen:
        raise UserError(f"data: found no line of text in {data}, expected at least one")
    return chosen


def score_lines(
    loaded: LoadedModel,
    lines: list[str],
    *,
    max_length: int,
    bf16: bool,
    hidden: Hidden,
    progress: ScoringProgress,
) -> Fields:
    """Total scores of all lines; repeated lines count each time but are scored once.

    Raises:
        UserError: a line has no tokens, such as one with only control characters.
    """
    number = {line: place for place, line in enumerate(dict.fromkeys(lines))}
    pieces, owners = [], []
    for line, place in number.items():
        windows = list(loaded.encoder.windows(line, length=max_length, step=max_length, place=f"the line {line!r:.60}"))
        pieces += windows
        owners += [place] * len(windows)
    if len(pieces) > len(number) and max_length > loaded.encoder.max_length:
        Console().warn(
            f"max_length: found {max_length}, the model has {loaded.encoder.max_length} positions: longer lines are "
            "scored in pieces of these"
        )
    warn_of_longer(loaded, pieces)
    progress.total = num_tokens(pieces, hidden)
    sums, tokens = [0.0] * len(number), [0] * len(number)
    found = log_likelihoods(loaded, pieces, hidden, bf16=bf16, progress=progress)
    texts = list(number)
    check_finite(found, lambda wrong: f"the line {texts[owners[wrong]]!r:.60}")
    for place, piece, value in zip(owners, pieces, found, strict=True):
        sums[place] += float(value)
        tokens[place] += sum(part > 0 for part in piece.parts)
    characters = sum(map(len, lines))
    likelihood = sum(sums[number[line]] for line in lines)
    return {
        "lines": len(lines),
        "characters": characters,
        "tokens": sum(tokens[number[line]] for line in lines),
        "log_likelihood": likelihood,
        "log_likelihood_per_character": likelihood / characters,
    }
