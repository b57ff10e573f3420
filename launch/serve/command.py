"""`cloze serve`: a model behind HTTP."""

from __future__ import annotations

import signal
import socket

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.hub import model_path
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or Ctrl-C, finish what was accepted; returns the exit status, not 0 if a second Ctrl-C has
    cut that short.
    """
    try:
        import fastapi_offline  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"serve: found no {error.name}, expected the packages of the server; pip install "
                        "'cloze[serve]'") from None
    listener = _listen(config)
    app = build_app(Predictor.from_folder(model_path(config)), config)

    class Server(uvicorn.Server):
        def handle_exit(self, number: int, frame) -> None:
            app.state.stopping = True
            super().handle_exit(number, frame)

    # Behind a stop uvicorn raises the signal again, so that it ends a process; ours has done its work and ends with 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    Console().say(f"serving {config.model} at http://{host}:{port} (a page to try it; /docs explains every operation)")
    server = Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30))
    server.run(sockets=[listener])
    if server.force_exit:
        Console().say("stopped by a second Ctrl-C; requests that were being answered were dropped")
        return 128 + signal.SIGINT  # the shell's convention for death by signal
    Console().say("stopped; every accepted request was answered")
    return 0


def _listen(config: ServeConfig) -> socket.socket:
    """Bind before the model is read, which may take a while. Raises UserError."""
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(f"serve: found {config.host}:{config.port} not free to listen on ({error}); choose another "
                        "--host or --port") from error
