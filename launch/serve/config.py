"""The fields of `cloze serve`."""

from dataclasses import dataclass, field

from cloze.launch.config.model import ModelConfig
from cloze.pipeline.bounds import MOST_SECONDS, bounds, check_bounds


@dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """Serve the predictions of `cloze predict` over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all networks, which needs api_key_file or no_auth."""
    port: int = field(default=8000, metadata=bounds(at_least=0, at_most=65_535))
    """Port to listen on; 0: a free one, which is printed."""
    api_key_file: str | None = None
    """File of API keys, one per line, of which each request must send one (Authorization: Bearer KEY); null: no key is
    required, for addresses of this machine only."""
    no_auth: bool = False
    """Whether other addresses are served without keys, for use behind a proxy that checks keys."""
    max_batch_tokens: int = field(default=8192, metadata=bounds(at_least=1))
    """Maximum tokens in one batch, over all requests; a larger request runs alone."""
    max_queue_tokens: int = field(default=1 << 20, metadata=bounds(at_least=1))
    """Tokens of waiting and running requests from which on the larger of the waiting and new ones get status 503."""
    max_queue_numbers: int = field(default=32_000_000, metadata=bounds(at_least=1))
    """Numbers in the results of waiting and running requests from which on the larger of the waiting and new ones get
    status 503."""
    max_texts: int = field(default=128, metadata=bounds(at_least=1))
    """Maximum texts in one request."""
    max_tokens: int = field(default=1 << 17, metadata=bounds(at_least=1))
    """Maximum tokens of all sequences of one request (a text to score makes one for each of its tokens)."""
    max_numbers: int = field(default=2_000_000, metadata=bounds(at_least=1))
    """Maximum numbers in the result of one request: attention weights, vectors, guesses."""
    max_characters: int = field(default=20_000, metadata=bounds(at_least=1))
    """Maximum characters of one text."""
    max_body_bytes: int = field(default=4 << 20, metadata=bounds(at_least=1))
    """Maximum bytes of one request's body."""
    max_bytes_in_flight: int = field(default=256 << 20, metadata=bounds(at_least=1))
    """Maximum bytes of all bodies and responses in transfer; beyond it, the connections that have waited longest for
    their clients, of those that hold as much as a new one, are closed."""
    max_connections: int = field(default=1000, metadata=bounds(at_least=1))
    """Maximum simultaneous connections; beyond it, the one that has waited longest for its client is closed."""
    read_seconds: float = field(default=30.0, metadata=bounds(above=0, at_most=MOST_SECONDS))
    """Seconds to receive a request's headers, from the connection or the last response on, and again for its body."""
    write_seconds: float = field(default=30.0, metadata=bounds(above=0, at_most=MOST_SECONDS))
    """Seconds within which a client must read a part of its response."""
    grace_seconds: float = field(default=30.0, metadata=bounds(above=0, at_most=MOST_SECONDS))
    """Seconds that accepted requests have to finish after a stop signal."""

    def __post_init__(self) -> None:
        check_bounds("", self)
