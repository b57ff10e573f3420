"""The fields of `cloze serve`."""

from dataclasses import dataclass

from cloze.launch.config.checks import at_least
from cloze.launch.config.model import ModelConfig
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """Serve the predictions of `cloze predict` over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all networks, which needs api_key_file or no_auth."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""
    api_key_file: str | None = None
    """File of API keys, one per line, of which each request must send one (Authorization: Bearer KEY); null: no key is
    required, for addresses of this machine only."""
    no_auth: bool = False
    """Whether other addresses are served without keys, for use behind a proxy that checks keys."""
    max_batch_tokens: int = 8192
    """Maximum tokens in one batch, over all requests, at least 1; a larger request runs alone."""
    max_queue_tokens: int = 1 << 20
    """Tokens of waiting and running requests from which on the larger of the waiting and new ones get status 503, at
    least 1."""
    max_queue_numbers: int = 32_000_000
    """Numbers in the results of waiting and running requests from which on the larger of the waiting and new ones get
    status 503, at least 1."""
    max_texts: int = 128
    """Maximum texts in one request, at least 1."""
    max_tokens: int = 1 << 17
    """Maximum tokens of all sequences of one request (a text to score makes one for each of its tokens), at least 1."""
    max_numbers: int = 2_000_000
    """Maximum numbers in the result of one request: attention weights, vectors, guesses; at least 1."""
    max_characters: int = 20_000
    """Maximum characters of one text, at least 1."""
    max_body_bytes: int = 4 << 20
    """Maximum bytes of one request's body, at least 1."""
    max_bytes_in_flight: int = 256 << 20
    """Maximum bytes of all bodies and responses in transfer, at least 1; beyond it, the connections that have waited
    longest for their clients, of those that hold as much as a new one, are closed."""
    max_connections: int = 1000
    """Maximum simultaneous connections, at least 1; beyond it, the one that has waited longest for its client is
    closed."""
    read_seconds: float = 30.0
    """Seconds to receive a request's headers, from the connection or the last response on, and again for its body,
    above 0."""
    write_seconds: float = 30.0
    """Seconds within which a client must read a part of its response, above 0."""
    grace_seconds: float = 30.0
    """Seconds that accepted requests have to finish after a stop signal, above 0."""

    def __post_init__(self) -> None:
        at_least(
            "serve",
            self,
            port=0,
            max_batch_tokens=1,
            max_queue_tokens=1,
            max_texts=1,
            max_tokens=1,
            max_numbers=1,
            max_characters=1,
            max_body_bytes=1,
            max_queue_numbers=1,
            max_bytes_in_flight=1,
            max_connections=1,
        )
        for name in ("read_seconds", "write_seconds", "grace_seconds"):
            if getattr(self, name) <= 0:
                raise UserError(f"serve.{name}: found {getattr(self, name)}, expected more than 0")
