"""Which documents are in train, validation and test: ranges of their hashes, from the counts of stage 1."""

import numpy as np

from cloze.pipeline.config import PAIR_OBJECTIVES, PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.exchange_stage import END, ExchangeLayout
from cloze.pipeline.jobs.shard_sizes import PARTITION_SIZE
from cloze.pipeline.jobs.tokenize_stage import Report
from cloze.pipeline.stores.places import Place

_EXACTLY_BELOW = 4096  # number of documents with the lowest hashes that are read individually


class TooLittleText(UserError):
    """The input has too few documents: what was prepared of it is of no use to any command."""


def plan_splits(
    config: PrepareConfig, report: Report, layout: ExchangeLayout, folder: Place
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Hash ranges of the splits, lowest hashes first, and remarks. A split that would be too small is enlarged.

    Args:
        report: total of stage 1.
        layout: of the parts in `folder`, after all rounds.

    Raises:
        TooLittleText: there is none, or for a pair objective fewer than two documents.
    """
    pairs = config.samples.objective in PAIR_OBJECTIVES
    needed = 2 if pairs else 1
    remarks, splits, low = [], {}, 0
    shares = {"validation": config.split.validation, "test": config.split.test}
    wanted = sum(share > 0 for share in shares.values())
    lowest, complete = _lowest_hashes(report, layout, folder, needed * (wanted + 1))
    total = int(report.documents.sum())
    if complete:  # duplicates are counted only now
        total = len(lowest)
    if total == 0:
        raise TooLittleText(
            "input: found no text in any document, expected some; look at --source.format and text_field"
        )
    if pairs and total < 2 and config.samples.random_share > 0 and config.samples.objective != "sentence_order":
        raise TooLittleText(
            f"samples.objective: found {total} document, expected at least 2 for {config.samples.objective}: a random "
            "segment B comes from another document; give more documents (of plain text a blank line ends one; with "
            "--source.format documents each line is one), or choose full_sentences"
        )
    for number, (split, share) in enumerate(shares.items()):
        high = low
        if share > 0:
            if total < needed * (wanted + 1):
                remarks.append(f"{split} is empty: {total} documents are too few to hold any out")
            else:
                high = low + int(share * END)
                first = int(np.searchsorted(lowest, np.uint64(low)))
                if first + needed <= len(lowest):  # minimum of this split
                    high = max(high, int(lowest[first + needed - 1]) + 1)
                if complete:  # and enough for the splits that follow
                    following = 1 + sum(later > 0 for later in list(shares.values())[number + 1 :])
                    high = min(high, int(lowest[total - needed * following]))
        splits[split] = (low, high)
        low = high
    splits["train"] = (low, END)
    return splits, remarks


def _lowest_hashes(report: Report, layout: ExchangeLayout, folder: Place, count: int) -> tuple[np.ndarray, bool]:
    """The lowest distinct hashes, enough to fill small splits; and whether these are all."""
    through = np.cumsum(report.documents)
    # `count` distinct hashes are needed, and there may be duplicates: read more.
    last = int(np.searchsorted(through, min(max(_EXACTLY_BELOW, 16 * count), int(through[-1]))))
    high = (last + 1) * PARTITION_SIZE
    hashes = [parts.read_hashes(folder / name, high) for name in layout.covering(0, high)]
    return np.unique(np.concatenate(hashes or [np.empty(0, np.uint64)])), bool(through[last] == through[-1])
