"""The tables of fine-tuning: kinds of tasks, and tasks. They import no kind: `--help` lists them without torch."""

from dataclasses import dataclass

from cloze.launch.config.tasks import Task
from cloze.pipeline.errors import UserError, did_you_mean
from cloze.pipeline.references import Entry

_TABLES = ".tsv, .csv, .jsonl, .parquet or a saved data set"


@dataclass(frozen=True)
class KindEntry(Entry):
    """A kind of task; its reference names an instance of Kind (kind.py)."""

    files: str = _TABLES
    """The form of its files, for the message that one is missing."""


KINDS = {
    "classification": KindEntry("cloze.launch.finetune.examples.classification:CLASSIFICATION", "a class"),
    "regression": KindEntry("cloze.launch.finetune.examples.classification:REGRESSION", "a number"),
    "multi_label": KindEntry("cloze.launch.finetune.examples.classification:MULTI_LABEL", "a set of labels"),
    "columns": KindEntry(
        "cloze.launch.finetune.examples.classification:LABEL_COLUMNS", "a class in each of several columns"
    ),
    "choice": KindEntry("cloze.launch.finetune.examples.choice:CHOICE", "one of several texts"),
    "tagging": KindEntry(
        "cloze.launch.finetune.examples.tagging:TAGGING",
        "a class for each word",
        "CoNLL (a word a line with its tag behind, an empty line between sentences)",
    ),
    "answering": KindEntry("cloze.launch.finetune.examples.answering:ANSWERS", "a span of a text", "SQuAD's JSON"),
    "embedding": KindEntry(
        "cloze.launch.finetune.examples.embedding:EMBEDDING",
        "nothing, but vectors of texts that are alike where the texts are",
    ),
}

_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_BINARY = ("0", "1")

# Columns as in the files that gluebenchmark.com distributes; metrics as in Wang et al. 2019, table 1.
TASKS = {
    "classification": Task("classification", ("text",), metrics=("accuracy", "f1_macro")),
    "pair-classification": Task("classification", ("text_a", "text_b"), metrics=("accuracy", "f1_macro")),
    "regression": Task("regression", ("text",), metrics=("pearson", "spearman", "mean_squared_error")),
    "pair-regression": Task("regression", ("text_a", "text_b"), metrics=("pearson", "spearman", "mean_squared_error")),
    "multi-label": Task("multi_label", ("text",), ("labels",), metrics=("f1_micro", "f1_macro", "exact_match")),
    "label-columns": Task("columns", ("text",), (), metrics=("accuracy_mean",)),
    "sst2": Task("classification", ("sentence",), labels=_BINARY, metrics=("accuracy",)),
    "cola": Task(
        "classification",
        ("sentence",),
        labels=_BINARY,
        metrics=("matthews_correlation", "accuracy"),
        header=("source", "label", "star", "sentence"),
    ),
    "mnli": Task(
        "classification",
        _PAIR,
        ("gold_label",),
        ("contradiction", "entailment", "neutral"),
        diagnostic=("Premise", "Hypothesis", "Label"),
    ),
    "qnli": Task("classification", ("question", "sentence"), labels=_ENTAILMENT),
    "rte": Task("classification", _PAIR, labels=_ENTAILMENT),
    "wnli": Task("classification", _PAIR, labels=_BINARY),
    "qqp": Task("classification", ("question1", "question2"), ("is_duplicate",), _BINARY, ("f1", "accuracy")),
    "mrpc": Task("classification", ("#1 String", "#2 String"), ("Quality",), _BINARY, ("f1", "accuracy")),
    "stsb": Task("regression", _PAIR, ("score",), metrics=("pearson", "spearman")),
    # Marelli et al. 2014, as SemEval distributes it.
    "sick-entailment": Task(
        "classification",
        ("sentence_A", "sentence_B"),
        ("entailment_judgment",),
        ("CONTRADICTION", "ENTAILMENT", "NEUTRAL"),
    ),
    "sick-relatedness": Task(
        "regression",
        ("sentence_A", "sentence_B"),
        ("relatedness_score",),
        metrics=("pearson", "spearman", "mean_squared_error"),
    ),
    "ner": Task("tagging", metrics=("f1",)),
    "pos": Task("tagging"),
    # Length and windows as in the BERT release's run_squad.py (doc_stride, a third of its max_seq_length).
    "squad": Task("answering", metrics=("f1",), max_length=384, window_step=128),
    "squad2": Task("answering", metrics=("f1",), max_length=384, window_step=128),
    "multiple-choice": Task("choice", ("text",), choices=("choice0", "choice1", "choice2", "choice3")),
    # Zellers et al. 2018, as in the files train.csv and val.csv.
    "swag": Task(
        "choice",
        ("sent1",),
        labels=("0", "1", "2", "3"),
        choices=("ending0", "ending1", "ending2", "ending3"),
        choice_prefix="sent2",
    ),
    # Mostafazadeh et al. 2016, the Story Cloze Test.
    "rocstories": Task(
        "choice",
        ("InputSentence1", "InputSentence2", "InputSentence3", "InputSentence4"),
        ("AnswerRightEnding",),
        ("1", "2"),
        choices=("RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2"),
    ),
    # Metrics of files with scores; of pairs those of retrieval: launch/finetune/examples/embedding.py.
    "embed": Task("embedding", ("anchor", "positive"), (), metrics=("spearman", "pearson")),
}


def find_task(name: str) -> Task:
    """The task of a name; UserError with the nearest one if there is none."""
    if name in TASKS:
        return TASKS[name]
    raise UserError(f"task: found {name!r}, expected one of {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
