"""The command `cloze`, and `python -m cloze COMMAND`, the form that torchrun and deepspeed start."""

import signal
import sys


def main() -> int:
    """Import and run the command line; a signal that comes meanwhile waits until `launch/system/local_launcher.py`
    takes it (`hear_stops`): Python's own answer to Ctrl-C is a traceback.

    Returns:
        The exit status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
    from cloze.launch.system.environment.process import open_standard_streams, read_and_write_utf8

    open_standard_streams()
    read_and_write_utf8()
    from cloze.launch.cli import main as run

    status = run()
    # While the interpreter ends, which takes a second with torch, what has ended is not stopped: Python takes its own
    # handlers away first. A first Ctrl-C ends it, without a traceback.
    unheard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_DFL if unheard else signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(main())
