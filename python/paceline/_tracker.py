"""The usage tracker for a script that nothing launched."""

import atexit
import contextlib
import os
import sys

from paceline import _library


class Usage:
    """What this process and those that it started have used, which :func:`track` gives.

    It is a context manager; leaving it, :meth:`stop` or the end of the program ends it.
    """

    def __init__(self, settings, quiet):
        self._quiet, self._pid, self._told = quiet, os.getpid(), None
        with _words():
            _library.track(settings)
        atexit.register(self._leave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._leave()

    def _leave(self):
        # The figures are the parent's in a forked child, and so is their end.
        if os.getpid() == self._pid:
            self.stop()

    def stop(self) -> None:
        """Ends it: files are written, and the summary is printed on stderr. Later calls do nothing."""
        if self._told is not None:
            return
        with _words():
            self._told = _library.track_end()
        atexit.unregister(self._leave)
        if not self._quiet and sys.stderr is not None:
            print(self.text, end="", file=sys.stderr, flush=True)

    @property
    def report(self) -> dict:
        """All figures so far, as ``paceline run --usage-json`` writes them."""
        return self._tell()["report"]

    @property
    def text(self) -> str:
        """The summary."""
        return self._tell()["text"]

    @property
    def total_s(self) -> float:
        """How long this process has been tracked."""
        return self.report["total_s"]

    @property
    def process(self) -> dict:
        """This process with those that it started: ``busy_s``, ``cpu_s``, ``utilization_percent`` (of one core), ``resident_peak_bytes`` and more."""
        return next(iter(self.report["ranks"]), {})

    @property
    def gpus(self) -> list:
        """Each GPU that this process can see: ``index``, ``busy_s``, ``utilization_percent``, ``memory_peak_bytes``, ``energy_j`` and more."""
        return self.report["gpus"]

    def _tell(self):
        if self._told is not None:
            return self._told
        with _words():
            return _library.tracked()


@contextlib.contextmanager
def _words():
    """Raises a failure with its advice."""
    try:
        yield
    except _library.Failure as failure:
        message, hint = str(failure), failure.report["hint"]
        raise RuntimeError(f"{message}\n  {hint}" if hint else message) from None


def track(*, csv=None, json=None, svg=None, lang=None, period=None, busy_percent=None, process_busy_percent=None, quiet=False) -> Usage:
    """Tracks what this process, those that it starts, and its GPUs do, until the program ends or the ``with`` block is left.

    At the end it prints on stderr what ``paceline run`` says of a job of one process, unless ``quiet``. ``csv``, ``json`` and ``svg`` are files
    for the samples, for all figures and for a picture; ``lang`` is "en" or "ko", else the locale's; ``period`` is the time between samples in
    seconds (0.1). A GPU counts as busy from ``busy_percent`` (5), the process from ``process_busy_percent`` of one core (50).

    Raises RuntimeError where the process is tracked already: by an earlier call, by the process which it was forked from, or by
    ``paceline run``; and where a setting makes no sense.
    """
    files = {name: os.path.abspath(os.fsdecode(file)) for name, file in (("csv", csv), ("json", json), ("svg", svg)) if file is not None}
    settings = {"lang": lang, "period_s": period, "busy_percent": busy_percent, "rank_busy_percent": process_busy_percent}
    return Usage(files | {name: value for name, value in settings.items() if value is not None}, quiet)
