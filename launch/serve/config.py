"""The fields of `cloze serve`."""

from dataclasses import dataclass

from cloze.launch.config.checks import at_least
from cloze.launch.config.model import ModelConfig


@dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """Answer over HTTP what `cloze predict` answers."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network: there is no authentication."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""
    max_batch_tokens: int = 8192
    """Tokens that go through the model together, over all requests, at least 1; a larger request goes alone."""
    max_queue_tokens: int = 1 << 20
    """Tokens that wait or run at which further requests are answered 503, at least 1."""
    max_texts: int = 128
    """Texts in one request, at least 1."""
    max_tokens: int = 1 << 17
    """Tokens of all sequences that one request makes (a text to score makes one for each of its tokens), at least 1."""
    max_numbers: int = 2_000_000
    """Numbers in the answer to one request: weights of attention, vectors, guesses; at least 1."""
    max_characters: int = 20_000
    """Characters of one text, at least 1."""
    max_body_bytes: int = 4 << 20
    """Bytes of one request's body, at least 1."""

    def __post_init__(self) -> None:
        at_least("serve", self, port=0, max_batch_tokens=1, max_queue_tokens=1, max_texts=1, max_tokens=1,
                 max_numbers=1, max_characters=1, max_body_bytes=1)
