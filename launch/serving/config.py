"""The fields of `cloze serve`."""

from dataclasses import dataclass

from launch.config.checks import at_least


@dataclass(frozen=True)
class ServeConfig:
    """Answer over HTTP what `cloze predict` answers."""

    model: str
    """A Hugging Face folder of a BERT, or the folder of a Cloze run."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network: there is no authentication."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""
    max_batch_texts: int = 64
    """Texts of one forward, over all requests that wait, at least 1."""
    max_queue_texts: int = 1024
    """Texts that may wait or run; a request beyond it is answered 503, at least 1."""
    max_texts: int = 128
    """Texts in one request, at least 1."""
    max_characters: int = 20_000
    """Characters of one text, at least 1."""
    max_body_bytes: int = 4 << 20
    """Bytes of one request's body, at least 1."""

    def __post_init__(self) -> None:
        at_least("serve", self, port=0, max_batch_texts=1, max_queue_texts=1, max_texts=1, max_characters=1,
                 max_body_bytes=1)
