"""The command `cloze`, and `python -m cloze COMMAND`, the form that torchrun and deepspeed start."""

import codecs
import locale
import os
import signal
import sys


def open_standard_streams() -> None:
    """Open what a wrapper or a daemon has closed (`>&-`) as the null device: the next file that is opened would take
    its place, and what is printed would be written into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def read_and_write_utf8() -> None:
    """Begin again in Python's UTF-8 mode where the locale has another encoding, as en_US without .UTF-8 on some
    clusters: what is printed (bars, tokens, other scripts) and read (configurations) is UTF-8. PYTHONUTF8=0 keeps the
    locale's.
    """
    if "PYTHONUTF8" not in os.environ and codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> int:
    """Import and run the command line; a signal that comes meanwhile waits until `launch/system/ranks.py` takes it
    (`hear_stops`): Python's own answer to Ctrl-C is a traceback.

    Returns:
        The exit status.
    """
    open_standard_streams()
    read_and_write_utf8()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    from cloze.launch.cli import main as run

    status = run()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one, while the interpreter ends
    return status


if __name__ == "__main__":
    sys.exit(main())
