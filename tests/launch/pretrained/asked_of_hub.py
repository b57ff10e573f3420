"""What processes of tests/forked.py ask of a hub; they must not import its client before they have its address."""

import sys

from cloze.launch import cli
from cloze.launch.commands import parse
from cloze.launch.predict import Predictor
from cloze.launch.pretrained.finding import model_path
from cloze.launch.pretrained.source import find_source
from cloze.pipeline.errors import UserError

ANSWER = "answer:"  # before what is found, among what libraries say


def fetched(asked: list[str]) -> int:
    """What is found by each of the commands, or why nothing is."""
    assert "huggingface_hub" not in sys.modules, "it reads its variables when it is imported"
    for words in asked:
        config = parse("finetune", ["sst2", "--train", "t", "--validation", "v", "--output", "o", *words.split()])
        try:
            source = find_source(config)
            print(ANSWER, len(source.weights), float(source.weights["bert.embeddings.word.weight"].sum()))
        except UserError as error:
            print(ANSWER, error)
    return 0


def used(given: list[str]) -> int:
    """What commands and Python find under a name."""
    name, cache = given
    cli.main(["predict", "embed", name, "w1 w2", "--cache_dir", cache])
    cli.main(["predict", "embed", "someone/else", "w1 w2", "--cache_dir", cache, "--offline", "true"])
    cli.main(["tokenize", name, "w1 w2", "--cache_dir", cache])
    print(model_path(parse("serve", [name, "--cache_dir", cache])))
    for revision in (None, "other"):
        model = Predictor.from_hub(name, revision=revision, cache_dir=cache, offline=revision is None)
        print(model.embed(["w1 w2"])[0].tolist())
    return 0
