"""`cloze` for those who start it by its name, or by a Python's: its processes are forked like those of forked.py, and
start in a fraction of a second instead of in many.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, arbitrary_address, wait
from pathlib import Path

from cloze.__main__ import main
from cloze.launch import cli
from tests.forked import FORKSERVER

# What is started: hands over its words, folder, variables and streams, passes signals on, and ends with the status.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = sys.argv[3:] if sys.argv[1:3] == ["-m", "cloze"] else sys.argv[1:]
said = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(said).to_bytes(4, "big")], [0, 1, 2])
server.sendall(said)
for number in (stops := (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)  # launchers block them for their children
sys.exit(int.from_bytes(server.recv(1) or b"\\1", "big"))
"""


@contextlib.contextmanager
def forked_cloze(folder: Path) -> Iterator[Path]:
    """Serve such commands.

    Yields:
        The program `cloze`, in the folder, which is made for it; it takes `-m cloze` too, as a Python does.
    """
    folder.mkdir()
    program, address = folder / "cloze", arbitrary_address("AF_UNIX")  # a short one, as the system wants it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        program.write_text(_CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        try:
            yield program
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def main_of_python(program: Path, command: list[str]) -> int:
    """The command in a process whose Python is that program: what it starts is forked."""
    sys.executable = str(program)
    return cli.main(command)


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is shut down
        while True:
            threading.Thread(target=_run, args=(listener.accept()[0],), daemon=True).start()


def _run(client: socket.socket) -> None:
    """Run a command for a client; one that has been killed is the command's death."""
    with client:
        length, streams, _, _ = socket.recv_fds(client, 4, 3)
        said = b""
        while len(said) < int.from_bytes(length, "big"):
            said += client.recv(1 << 16)
        handed = [Connection(each) for each in streams]
        process = FORKSERVER.Process(target=_become, args=(*json.loads(said), handed))
        process.start()
        for each in handed:
            each.close()
        while client in wait([process.sentinel, client]):
            with contextlib.suppress(ProcessLookupError):
                if number := client.recv(1):
                    os.kill(process.pid, number[0])
                else:
                    process.kill()
                    break
        process.join()
        with contextlib.suppress(BrokenPipeError):
            client.sendall(bytes([process.exitcode if process.exitcode >= 0 else 128 - process.exitcode]))


def _become(words: list[str], folder: str, variables: dict[str, str], handed: list[Connection]) -> None:
    """Be the command as the client was started."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    tempfile.tempdir = None  # found anew, by these variables
    for number, each in enumerate(handed):
        os.dup2(each.fileno(), number)
        each.close()
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = ["cloze", *words]
    sys.exit(main())
