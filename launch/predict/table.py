"""The table of operations by name. It imports none of them: `cloze --help` lists their commands without NumPy."""

from dataclasses import dataclass

from cloze.pipeline.references import Entry


@dataclass(frozen=True)
class OperationEntry(Entry):
    """An operation, in Python and in `cloze serve` by its class, on the command line by its command."""

    command: str = ""
    """`module:name` of the configuration of `cloze predict NAME`; empty: it has no such command."""
    main: tuple[str, ...] = ()
    """Options that `--help` shows first."""
    examples: tuple[str, ...] = ()
    """Command lines, as they are typed."""
    models: tuple[str, ...] = ()
    """Classes of models whose operation it is where a command names none."""


OPERATIONS = {
    "fill-mask": OperationEntry(
        "cloze.launch.predict.blanks:FillMask",
        "fill the blanks of texts",
        "cloze.launch.predict.blanks:FillMaskConfig",
        ("top_k",),
        ("cloze predict fill-mask runs/small 'The capital of [MASK] is Paris.'",),
        ("BertForPreTraining", "BertForMaskedLM"),
    ),
    "classify": OperationEntry(
        "cloze.launch.predict.labels:Classify",
        "label texts or pairs of texts",
        "cloze.launch.predict.labels:ClassifyConfig",
        ("pair", "top_k"),
        (
            "cloze predict classify runs/own 'a fine film'",
            "cloze predict classify runs/own --file new.csv --output results.csv",
        ),
        ("BertForSequenceClassification",),
    ),
    "tag": OperationEntry(
        "cloze.launch.predict.tags:TagWords",
        "tag the words of texts: entities, parts of speech",
        "cloze.launch.predict.tags:TagConfig",
        ("aggregation",),
        ("cloze predict tag runs/ner 'Ada Lovelace lived in London.'",),
        ("BertForTokenClassification",),
    ),
    "answer": OperationEntry(
        "cloze.launch.predict.answers:AnswerQuestion",
        "answer questions from a text",
        "cloze.launch.predict.answers:AnswerConfig",
        ("context", "top_k"),
        ("cloze predict answer runs/squad 'Who came?' --context 'Ada came at noon.'",),
        ("BertForQuestionAnswering",),
    ),
    "choose": OperationEntry(
        "cloze.launch.predict.choices:Choose",
        "choose the best continuation of a text",
        "cloze.launch.predict.choices:ChooseConfig",
        (),
        ("cloze predict choose runs/swag 'She opened the door.' 'It was raining.' 'Doors are eaten.'",),
        ("BertForMultipleChoice",),
    ),
    "similarity": OperationEntry(
        "cloze.launch.predict.vectors:Compare",
        "compare texts by similarity",
        "cloze.launch.predict.vectors:SimilarityConfig",
        ("pooling",),
        ("cloze predict similarity runs/small 'a cat' 'a dog' 'a car'",),
    ),
    "embed": OperationEntry(
        "cloze.launch.predict.vectors:Embed",
        "one vector for each text",
        "cloze.launch.predict.vectors:EmbedConfig",
        ("pair", "pooling", "dimensions", "picture"),
        ("cloze predict embed runs/small --file texts.txt --output vectors.npy",),
    ),
    "features": OperationEntry(
        "cloze.launch.predict.vectors:Features",
        "vectors of tokens or of a word, a picture of attention",
        "cloze.launch.predict.vectors:FeaturesConfig",
        ("word", "attention"),
        ("cloze predict features runs/small 'the bank of a river' --word bank",),
    ),
    "word": OperationEntry("cloze.launch.predict.vectors:FindWord", "vectors of all occurrences of a word"),
    "score": OperationEntry(
        "cloze.launch.predict.blanks:Score",
        "rank texts by their probability",
        "cloze.launch.predict.blanks:ScoreConfig",
        (),
        ("cloze predict score runs/small 'the cat sat' 'the cat sitted'",),
    ),
    "attention": OperationEntry("cloze.launch.predict.vectors:Attend", "weights of all attention heads"),
    "tokenize": OperationEntry("cloze.launch.predict.tokenize:Tokenize", "the inputs of a model for texts"),
}
