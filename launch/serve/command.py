"""`cloze serve`: starts the HTTP server of a model and stops it gracefully."""

import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
from types import FrameType

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.finding import model_path
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.connections import Listener, make_room_for_files, protocol
from cloze.launch.serve.keys import read_keys
from cloze.launch.system.console import Console
from cloze.launch.system.environment.process import share_one_arena
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install

# torch gives up Python's lock for each operation, and asyncio for each read: both wait so long for it while results
# become JSON in other threads. With Python's 5 ms a forward of 100 operations took over a second.
_SWITCH_SECONDS = 0.0005
# Seconds after the grace period to close connections and end the interpreter.
_ENDING_SECONDS = 3.0


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish accepted requests; the exit status is not 0 if the end of the grace
    period or a second Ctrl-C interrupted that.
    """
    try:
        import fastapi_offline  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(
            f"serve: found no {error.name}, expected the packages of the server; {how_to_install('serve')}"
        ) from None
    sys.setswitchinterval(_SWITCH_SECONDS)
    share_one_arena()  # before there are threads, each of whose heaps would keep its peak size
    read_keys(config)  # errors of the keys are raised before the model is loaded
    make_room_for_files(config)
    listener = Listener(_listen(config), config)
    app = build_app(Predictor.from_folder(model_path(config)), config)
    gc.freeze()  # a collection need not look at the libraries and the model

    class Server(uvicorn.Server):
        def handle_exit(self, number: int, frame: FrameType | None) -> None:
            if not app.state.stopping:
                # Threads that run the model cannot be cancelled, and Python waits for them before it exits.
                last = threading.Timer(config.grace_seconds + _ENDING_SECONDS, _end_without_threads, (config,))
                last.daemon = True
                last.start()
            app.state.stopping = True
            super().handle_exit(number, frame)
            if self.force_exit:  # what it cancels then is logged as an error, with a traceback
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

        async def main_loop(self) -> None:
            for number in heard.copy():
                self.handle_exit(number, None)
            await super().main_loop()

    # A signal that comes before uvicorn takes them over, when who waits for the line below may send one, is answered
    # once it serves. After a graceful stop it raises the signal again to end the process; ours has finished and exits
    # with 0.
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: heard.append(number))
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    Console().say(f"serving {config.model} at {address} (a page to try it; /docs explains every operation)")
    # uvicorn's warnings are about clients' requests, one line each.
    server = Server(
        uvicorn.Config(
            app,
            log_level="error",
            http=protocol(config),
            ws="none",
            access_log=False,
            timeout_keep_alive=math.ceil(config.read_seconds),
            timeout_graceful_shutdown=math.ceil(config.grace_seconds),
        )
    )
    server.run(sockets=[listener])
    if server.force_exit:
        Console().say("stopped by a second Ctrl-C; requests that were being answered were dropped")
        return 128 + signal.SIGINT  # the shell's convention for death by signal
    if dropped := app.state.traffic.dropped:
        Console().say(
            f"stopped after {config.grace_seconds:g} s (grace_seconds); {dropped} requests that were being "
            "answered were dropped"
        )
        return 1
    Console().say("stopped; every accepted request was answered")
    return 0


def _end_without_threads(config: ServeConfig) -> None:
    Console().say(
        f"stopped {config.grace_seconds:g} s (grace_seconds) after the signal, while the model was running; "
        "requests that were being answered were dropped"
    )
    os._exit(1)


def _listen(config: ServeConfig) -> socket.socket:
    """Bind the socket before the model is loaded, which may take a while.

    Raises:
        UserError: the address can't be used.
    """
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"serve: found {config.host}:{config.port} not free to listen on ({error}); choose another --host or --port"
        ) from error
