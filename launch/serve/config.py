"""The fields of `cloze serve`."""

from dataclasses import dataclass

from cloze.launch.config.checks import at_least
from cloze.launch.config.model import ModelConfig
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """Answer over HTTP what `cloze predict` answers."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network, which needs api_key_file."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""
    api_key_file: str | None = None
    """File of API keys, one a line, of which requests must bring one (Authorization: Bearer KEY); null: none is asked
    for, which is for addresses of this machine alone."""
    no_auth: bool = False
    """Whether other addresses are served without keys: where a proxy asks for them."""
    max_batch_tokens: int = 8192
    """Tokens that go through the model together, over all requests, at least 1; a larger request goes alone."""
    max_queue_tokens: int = 1 << 20
    """Tokens that wait or run at which the larger ones of further and waiting requests are answered 503, at least 1."""
    max_queue_numbers: int = 32_000_000
    """Numbers in the answers to requests that wait or run at which the larger ones of further and waiting requests are
    answered 503, at least 1."""
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
    max_bytes_in_flight: int = 256 << 20
    """Bytes of all bodies and answers that are being received and sent, at least 1; beyond them clients that are waited
    for longest, and hold as much as a new one, are given up."""
    max_connections: int = 1000
    """Connections at a time, at least 1; beyond them the one that has waited longest for its client is closed."""
    read_seconds: float = 30.0
    """Time for the head of a request, from the connection or the last answer on, and for its body, above 0."""
    write_seconds: float = 30.0
    """Time in which a client must have read something of its answer, above 0."""
    grace_seconds: float = 30.0
    """Time that a stop gives to the requests that were accepted, above 0."""

    def __post_init__(self) -> None:
        at_least("serve", self, port=0, max_batch_tokens=1, max_queue_tokens=1, max_texts=1, max_tokens=1,
                 max_numbers=1, max_characters=1, max_body_bytes=1, max_queue_numbers=1, max_bytes_in_flight=1,
                 max_connections=1)
        for name in ("read_seconds", "write_seconds", "grace_seconds"):
            if getattr(self, name) <= 0:
                raise UserError(f"serve.{name}: found {getattr(self, name)}, expected more than 0")
