"""The fields of `cloze evaluate`."""

from dataclasses import dataclass, field, fields
from typing import Literal

from cloze.launch.config.model import ModelConfig
from cloze.launch.parsing.fields import shown
from cloze.launch.system.pictures import check_ending
from cloze.pipeline.bounds import bounds, check_bounds
from cloze.pipeline.errors import UserError

_FOR_SUITES = {
    ("blimp",): ("picture",),
    ("lines",): ("max_length",),
    ("blimp", "lines"): ("every_checkpoint", "precision", "every_nth", "score", "masked"),
    ("glue",): ("seeds", "random_weights", "finetune_config", "output"),
}


@dataclass(frozen=True)
class EvaluateConfig(ModelConfig):
    """Evaluate a model: the probabilities that it gives texts, or its results after fine-tuning."""

    suite: Literal["blimp", "lines", "glue"] = "blimp"
    """blimp: files of minimal pairs, in which the good sentence should be more probable; lines: held-out text, each
    line on its own; glue: fine-tuning on GLUE tasks with several seeds."""
    data: str = ""
    """blimp: a folder of *.jsonl files, with sentence_good and sentence_bad in each line; lines: a file, a folder or a
    glob of text, or of *.jsonl with the field text, compressed or not; glue: a folder with a folder for each task, such
    as SST-2 or cola, with train.tsv and dev.tsv."""
    step: int | Literal["best"] | None = None
    """Step of a run's checkpoint; best: the checkpoint of the best evaluation; null: the newest good one."""
    every_checkpoint: bool = False
    """Whether all checkpoints of a run that have not been evaluated yet are evaluated, also during training; their
    results are written to RUN/evaluate-SUITE (with a causal score RUN/evaluate-SUITE-causal) and as curves to
    TensorBoard."""
    json: str | None = None
    """File for the results; null: none."""
    picture: str | None = None
    """Image file (*.png, *.pdf, *.svg) for the results; null: none."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the matrix products. auto: blimp in bf16, repeated in fp32 for close pairs (see
    docs/evaluate.md), or all in fp32 where that is faster; lines in fp32."""
    every_nth: int = field(default=1, metadata=bounds(at_least=1))
    """For a quick look: 10 evaluates every tenth line, or every tenth pair of each file, starting with the first; 1 is
    all."""
    max_length: int = field(default=128, metadata=bounds(at_least=8))
    """lines: longest sequence in tokens, special tokens included; a longer line is split into consecutive windows that
    do not attend to each other."""
    score: Literal["pseudo", "causal"] = "pseudo"
    """How blimp and lines score a text. pseudo: by its pseudo-log-likelihood, each token given all others; causal: by
    its log-likelihood, each token given those before it, for a model that was trained on next tokens
    (train.causal_share)."""
    masked: Literal["token", "rest_of_word"] | None = None
    """pseudo: what is masked when a token is predicted: the token alone (arXiv 1910.14659), or also the later tokens of
    its word (arXiv 2305.10588), by which vocabularies compare; null: rest_of_word for lines, token for blimp."""

    seeds: int = field(default=5, metadata=bounds(at_least=1, at_most=1000))
    """glue: runs per task."""
    random_weights: bool = False
    """glue: whether models of the same shape with random weights are evaluated too, as a baseline."""
    finetune_config: str = "small-models"
    """glue: configuration of `cloze finetune`, a path or a name in configs/finetune/."""
    output: str | None = None
    """glue: folder of the fine-tuning runs; completed ones are not repeated."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        check_ending("picture", self.picture)
        if not self.data:
            raise UserError("data: found none, expected the texts of the suite; give --data FOLDER")
        if self.every_checkpoint and (self.step is not None or self.json or self.picture):
            raise UserError(
                "every_checkpoint: found true with step, json or picture, expected it alone: results are written to "
                "RUN/evaluate-SUITE"
            )
        usual = {each.name: each.default for each in fields(self)}
        for suites, names in _FOR_SUITES.items():
            for name in names:
                if self.suite not in suites and getattr(self, name) != usual[name]:
                    raise UserError(
                        f"{name}: found {shown(getattr(self, name))} with suite {self.suite}, expected none: it is for "
                        f"{' and '.join(suites)}"
                    )
        if self.suite == "glue" and self.output is None:
            raise UserError("output: found none with suite glue, expected a folder for the fine-tuning runs")
        if self.score == "causal" and self.masked:
            raise UserError(
                f"score: found causal with masked {self.masked}, expected pseudo: nothing is masked for a causal score"
            )

    @property
    def hidden(self) -> Literal["token", "rest_of_word", "later"]:
        """What is hidden when a token is predicted: it alone, it and the rest of its word, or all from it on."""
        if self.score == "causal":
            return "later"
        return self.masked or ("rest_of_word" if self.suite == "lines" else "token")
