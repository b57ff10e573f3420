"""The model of a new run, with its initial weights."""

from pathlib import Path

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.system.console import Console
from cloze.model.bert import BertPreTrained
from cloze.model.encoder import Attention, Encoder
from cloze.model.initialization import init_weights, init_word_embeddings
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import at_rest, readable_errors
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import check_regular


def build_model(config: PretrainConfig, objective: Objective | None = None) -> BertPreTrained:
    """The model of the run with its initial weights.

    Args:
        objective: the objective; None: the one that the configuration names.

    Raises:
        UserError: the objective's model is not one that a run can train.
    """
    objective = objective or make_objective(config)
    model = objective.build_model()
    if not isinstance(model, BertPreTrained):
        raise UserError(
            f"objective: found a {type(model).__name__} made by {type(objective).__name__}.build_model, "
            "expected a subclass of cloze.model.bert.BertPreTrained"
        )
    init_weights(model, config.seed)
    for module in model.modules():
        if isinstance(module, Attention):
            module.joins_gradients = config.train.qkv_gradients == "joined"
        if isinstance(module, Encoder) and config.train.compile:
            module.compile_layers()
    return model


_MOST_CHARACTERS = 1 << 20  # of a line of word vectors: 50,000 numbers


def check_word_vectors(path: Path, width: int) -> None:
    """Whether a file of word vectors can be read, and whether its first vector has the width of the embeddings.

    Raises:
        UserError: there is no such file, or the vector has another width.
    """
    check_regular(path)
    with readable_errors(path), open(path, encoding="utf-8", errors="replace") as lines:
        read = [lines.readline(_MOST_CHARACTERS) for _ in range(2)]
    if len(max(read, key=len)) == _MOST_CHARACTERS:
        raise UserError(f"{path}: found a line of {_MOST_CHARACTERS:,} characters, expected a word and its numbers")
    first = [line.rstrip().split(" ") for line in read]
    _, *values = first[len(first[0]) == 2]  # the first line may hold the counts of words and dimensions
    if values and len(values) != width:
        raise UserError(
            f"{path}:{1 + (len(first[0]) == 2)}: found {len(values)} numbers, expected {width}, the width of the "
            "embeddings (model.hidden_size, or model.embedding_size where that is given)"
        )


def take_word_vectors(path: Path, tokenizer: Tokenizer, model: BertPreTrained, console: Console) -> None:
    """Copy word vectors from a file (`init_word_vectors`) into a newly initialized model; tokens without a vector keep
    theirs.

    Raises:
        UserError, ModelError: there is no such file, it contains none of the tokens, its vectors do not have the width
            of the model's embeddings, or it was written meanwhile.
    """
    tokens = tokenizer.tokens
    numbers = {token: number for number, token in enumerate(tokens) if token and number != model.config.pad_token_id}
    with readable_errors(path), open(path, "rb") as whole, at_rest(whole, path):
        num_taken = init_word_embeddings(model, path, numbers)
    console.say(f"init_word_vectors: {num_taken:,} of {len(numbers):,} tokens start from {path}")
