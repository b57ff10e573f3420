"""Entities of every tagging scheme, against seqeval."""

import random

import numpy as np
import pytest
from seqeval import scheme
from seqeval.metrics import f1_score

from cloze.launch.finetune.examples.tagging import TagExamples, find_tags, read_entities
from cloze.launch.finetune.tasks import find_task
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# seqeval's scheme, and the prefixes of an entity of n words, which one of its kind may stand directly behind or before.
SCHEMES = {
    "IOB1": (scheme.IOB1, lambda n, behind, before: ("B" if behind else "I") + "I" * (n - 1)),
    "IOB2": (scheme.IOB2, lambda n, behind, before: "B" + "I" * (n - 1)),
    "IOE": (scheme.IOE2, lambda n, behind, before: "I" * (n - 1) + "E"),
    "IOE1": (None, lambda n, behind, before: "I" * (n - 1) + ("E" if before else "I")),
    "IOBES": (scheme.IOBES, lambda n, behind, before: "S" if n == 1 else "B" + "I" * (n - 2) + "E"),
    "BILOU": (scheme.BILOU, lambda n, behind, before: "U" if n == 1 else "B" + "I" * (n - 2) + "L"),
    "BMES": (None, lambda n, behind, before: "S" if n == 1 else "B" + "M" * (n - 2) + "E"),
    "BMEWO": (None, lambda n, behind, before: "W" if n == 1 else "B" + "M" * (n - 2) + "E"),
}


def draw(rng, words: int) -> list[tuple[str, int, int]]:
    """Entities of a sentence: kind, first word, one past the last; often one directly behind another."""
    entities, place = [], rng.randrange(3)
    while (end := place + rng.randint(1, 4)) <= words:
        entities.append((rng.choice(("PER", "LOC")), place, end))
        place = end + rng.choice((0, 0, 1, 3))
    return entities


def written(name: str, entities: list[tuple[str, int, int]], words: int) -> list[str]:
    tags = ["O"] * words
    for kind, first, end in entities:
        behind, before = ({(other[0], other[spot]) for other in entities} for spot in (2, 1))
        prefixes = SCHEMES[name][1](end - first, (kind, first) in behind, (kind, end) in before)
        tags[first:end] = [f"{prefix}-{kind}" for prefix in prefixes]
    return tags


@pytest.mark.parametrize("name", SCHEMES)
def test_entities_of_every_scheme_are_scored_as_seqeval_does(model, tmp_path, name):
    rng = random.Random(2)
    lengths = [rng.randint(4, 12) for _ in range(60)]
    true = [draw(rng, length) for length in lengths]
    guessed = [
        entities if rng.random() < 0.5 else draw(rng, length) for entities, length in zip(true, lengths, strict=True)
    ]
    rows = [written(name, *each) for each in zip(true, lengths, strict=True)]
    path = tmp_path / "dev.conll"
    path.write_text("".join("".join(f"w1 {tag}\n" for tag in tags) + "\n" for tags in rows))
    sentences = read_entities(path)
    head = find_tags(sentences, [])
    assert head.labels == ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")
    examples = TagExamples(sentences, find_task("ner"), head, Tokenizer.from_folder(model), 64)
    assert ("read as IOB2" in examples.facts) == (name != "IOB2")

    def scores(entities) -> dict:
        tags = [tag for each in zip(entities, lengths, strict=True) for tag in written("IOB2", *each)]
        labels = examples.targets(np.arange(len(examples)))["labels"].numpy()
        outputs = np.zeros((len(labels), len(head.labels)), np.float32)
        outputs[np.flatnonzero(labels >= 0), [head.labels.index(tag) for tag in tags]] = 1
        return examples.metrics(outputs)

    assert scores(true)["f1"] == scores(true)["accuracy"] == 1.0
    kind = SCHEMES[name][0]  # without one the same words in a scheme that seqeval has
    both = [
        [written(name if kind else "IOBES", *each) for each in zip(entities, lengths, strict=True)]
        for entities in (true, guessed)
    ]
    expected = f1_score(*both, mode="strict", scheme=kind or scheme.IOBES)
    assert scores(guessed)["f1"] == pytest.approx(expected) and 0.3 < expected < 0.9


def test_tags_without_kinds_and_mistakes_in_a_file_of_iob2(tmp_path):
    (tmp_path / "bare.conll").write_text("w1 B\nw2 I\nw3 O\n")
    bare = read_entities(tmp_path / "bare.conll")
    assert bare.tags == ["B-entity", "I-entity", "O"] and "without kinds" in bare.scheme
    rows = ["B-x", "O", "B-x", "I-x", "B-y", "O", "I-x", "O"]  # seqeval leaves the last one out
    (tmp_path / "wrong.conll").write_text("".join(f"w1 {tag}\n" for tag in rows))
    wrong = read_entities(tmp_path / "wrong.conll")
    assert (wrong.tags, wrong.scheme) == (rows, "IOB2") and find_tags(wrong, []).labels == ("O", "B-x", "B-y", "I-x")
    (tmp_path / "iob1.conll").write_text("w1 I-x\n\nw1 I-x\nw2 I-x\nw3 B-x\nw4 O\nw5 B-x\n")
    assert read_entities(tmp_path / "iob1.conll").tags == ["B-x", "B-x", "I-x", "B-x", "O", "B-x"]
