"""Configuration of fine-tuning for text vectors (the section `embedding`)."""

from dataclasses import dataclass, field

from cloze.pipeline.bounds import bounds, check_bounds
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class EmbeddingConfig:
    """The contrastive loss of the task embed, and the sizes of its vectors."""

    temperature: float = field(default=0.05, metadata=bounds(above=0))
    """Divisor of the cosines before the softmax; 0.05: SimCSE's (Gao et al. 2021, arXiv 2104.08821), equal to a scale
    of 20 in sentence-transformers."""
    symmetric: bool = False
    """Whether each positive must also find its anchor among all anchors of the batch; the loss is then the mean of both
    directions."""
    same_text_negatives: bool = False
    """Whether a text of another row counts as a negative of a row whose anchor or positive is the same text; false: it
    is left out of that row's softmax."""
    dimensions: list[int] = field(default_factory=list)
    """Smaller vector sizes, at least 1 each: the first numbers of each vector, taken as a vector, get the same loss,
    and the losses of all sizes are summed (Matryoshka; Kusupati et al. 2022, arXiv 2205.13147)."""
    scored_columns: list[str] = field(default_factory=list)
    """The two text columns of files with scores; empty: sentence1 and sentence2, or sentence_A and sentence_B, or the
    first two of text_columns."""

    def __post_init__(self) -> None:
        check_bounds("embedding", self)
        if any(size < 1 for size in self.dimensions) or len(set(self.dimensions)) < len(self.dimensions):
            raise UserError(
                f"embedding.dimensions: found {', '.join(map(str, self.dimensions))}, expected sizes of at "
                "least 1, each once"
            )
        if len(self.scored_columns) not in (0, 2):
            raise UserError(f"embedding.scored_columns: found {', '.join(self.scored_columns)}, expected two columns")
