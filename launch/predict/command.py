"""`cloze predict`: reads texts, runs an operation, prints or writes the results."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cloze.launch.predict.blanks import ScoreConfig
from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Result, Row, plain
from cloze.launch.predict.output import encoded, print_results, print_table, wants_table, write_results
from cloze.launch.predict.pictures import Points, draw_attention
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.rows import read_rows
from cloze.launch.predict.vectors import EmbedConfig, FeaturesConfig, WordInContext
from cloze.launch.pretrained.finding import model_path
from cloze.launch.system.console import Console, counting, figure
from cloze.pipeline.errors import UserError


def predict(config: Input) -> int:
    """Print the results of an operation for every text.

    Returns:
        The exit status.
    """
    predictor = Predictor.from_folder(model_path(config))
    if isinstance(config, FeaturesConfig) and (config.word or config.attention):
        return _print_features(predictor, config)
    console = Console()
    cut: Counter[str] = Counter()
    results = _answered(predictor, config, cut)
    points = None
    if isinstance(config, EmbedConfig) and config.picture:
        points = Points(Path(config.picture), config.colour_column)
        results = points.noting(results)
    if config.output or points:
        with counting("texts") as done:
            noted = ((done(), *pair)[1:] for pair in results)
            output = Path(config.output) if config.output else None
            number = write_results(output, config, predictor.loaded, noted) if output else sum(1 for _ in noted)
        if output:
            console.say(f"wrote {number:,} results to {config.output}")
    else:
        if isinstance(config, ScoreConfig) and wants_table(config):
            results = iter(sorted(results, key=lambda pair: -pair[1].log_probability))
        print_results(config, results)
    if points:
        console.say(points.draw())
    if tokens := cut.total():
        longest = predictor.loaded.encoder.truncation.max_length
        console.warn(f"{tokens:,} tokens of texts beyond the {longest} that the model reads were truncated")
    _warn_of_texts(predictor)
    return 0


def _warn_of_texts(predictor: Predictor) -> None:
    encoder = predictor.loaded.encoder
    if encoder.longer_texts:
        Console().warn(
            f"found {encoder.longer_texts:,} texts of more than the {encoder.truncation.max_length} tokens "
            "that the model was trained on; expect lower accuracy there, or divide them"
        )
    if encoder.spelled_specials:
        Console().warn(
            f"found {encoder.spelled_specials:,} texts that spell a special token, such as "
            f"{encoder.tokenizer.names['separator']}: its characters are read as text, where transformers reads the "
            "token; give the two texts of a pair apart"
        )


def _answered(predictor: Predictor, config: Input, cut: Counter[str]) -> Iterator[tuple[Row, Result]]:
    """Each text with its result.

    Args:
        cut: counts truncated tokens.
    """
    for row, result in predictor.map_rows(config, read_rows(config, predictor.loaded.columns)):
        cut["tokens"] += getattr(result, "cut_tokens", 0)
        yield row, result


def _print_features(predictor: Predictor, config: FeaturesConfig) -> int:
    rows = list(read_rows(config, predictor.loaded.columns))
    if config.attention:
        if len(rows) != 1:
            raise UserError(f"attention: found {len(rows)} texts, expected one to draw")
        draw_attention(predictor.attention(rows[0].text, rows[0].pair), Path(config.attention))
        layers, heads = predictor.config.num_hidden_layers, predictor.config.num_attention_heads
        Console().say(f"drew {layers} layers of {heads} heads to {config.attention}")
    if config.word:
        _print_words(config, predictor.word(config.word, rows, config.layer))
    _warn_of_texts(predictor)
    return 0


def _print_words(config: FeaturesConfig, words: list[WordInContext]) -> None:
    if not wants_table(config):
        for word in words:
            print(encoded(plain(word)), flush=True)
        return
    print_table(
        {"text": word.text, "characters": f"{word.start}-{word.end}", "to static": figure(word.cosine_to_static)}
        | {f"to {number}": figure(value) for number, value in enumerate(word.cosines, 1)}
        for word in words
    )
