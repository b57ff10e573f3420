"""The command `cloze`, and `python -m cloze COMMAND`, the form that torchrun and deepspeed start."""

import signal
import sys


def main() -> int:
    """Import and run the command line; a signal that comes meanwhile waits until `launch/system/local_launcher.py`
    takes it (`hear_stops`): Python's own answer to Ctrl-C is a traceback.

    Returns:
        The exit status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    from cloze.launch.system.environment.process import open_standard_streams, read_and_write_utf8

    open_standard_streams()
    read_and_write_utf8()
    from cloze.launch.cli import main as run

    status = run()
    # While the interpreter ends, which takes a second with torch: what is complete is not stopped, and Ctrl-C is no
    # traceback.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return status


if __name__ == "__main__":
    sys.exit(main())
