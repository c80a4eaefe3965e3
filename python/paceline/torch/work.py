"""Operations on their way."""

import ctypes
import os
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import _library as library
from paceline.torch.version import VERSION

# C++ code of torch 2.6 holds a work without its Python part. Once that is gone, C++ waits in a `wait` of its own, which nothing ends.
_CPP_LOSES_PYTHON = VERSION < (2, 7)

# Works that were forgotten before they were over, with the tensors that they use.
_forgotten: dict = {}
# Works that Python has let go of and C++ may still wait for, by identity: until they are over, or for good if no tensor can keep them.
_kept: dict = {}
# Works whose futures wait, by handle.
_awaited: dict = {}
_lock = threading.Lock()
_thread = None


class Work(dist.Work):
    """One or several calls of the library, with the tensors that they use.

    ``landings`` put what the library has written where the program expects it.
    """

    def __init__(self, group, handles, tensors, landings, result):
        super().__init__()
        self._group = group
        self._handles = handles
        self._tensors = tensors
        self._landings = landings
        self._result = result
        self._error = None
        self._source = -1
        self._future = None
        self._is_awaited = not _CPP_LOSES_PYTHON
        self._ties = []
        self._guard = threading.Lock()
        if not handles:
            self._land()

    def wait(self, timeout=None):
        """Waits until the operation is over, or ``timeout``, if that is not 0, has passed."""
        limit = None if not timeout else timeout / timedelta(milliseconds=1)
        if not self._is_over(-1 if limit is None else max(1, int(limit))):
            message = f"the operation is not over after {timeout.total_seconds():g} s; it goes on"
            raise self._group._error(library.report("timeout", message))
        self._release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self):
        return self._is_over(0)

    def is_success(self):
        return self._is_over(0) and self._error is None

    def exception(self):
        self._is_over(0)
        return self._error

    def result(self):
        self.wait()
        return self._result

    def synchronize(self):
        self.wait()

    def source_rank(self):
        return self._source

    _source_rank = source_rank

    def get_future(self):
        with self._guard:
            if self._future is not None:
                return self._future
            # An exception that a callback raises is one in C++ too; one that is set from Python is a value there.
            self._finished = torch.futures.Future()
            self._future = self._finished.then(lambda _: self._value())
        self._release()
        self._tell()
        return self._future

    def _value(self):
        self.wait()
        return self._result

    def _tell(self):
        """Asks to be told of the end of the next call, or completes the future."""
        handles = self._handles
        if not handles:
            self._finished.set_result(None)
            return
        _awaited[handles[0]] = self
        _start_thread()
        if library.notify(handles[0]) == library.FAILED:
            # Another thread has just forgotten it.
            _awaited.pop(handles[0], None)
            self._told()

    def _told(self):
        self._is_over(0)
        self._tell()

    def _is_over(self, limit_ms):
        source = ctypes.c_int64(-1)
        while self._handles:
            handle = self._handles[0]
            status = library.wait(handle, limit_ms, source)
            if status == library.PENDING:
                return False
            report = library.text() if status == library.FAILED else None
            with self._guard:
                # Another thread may have been faster.
                if self._handles and self._handles[0] == handle:
                    self._settle(report, source.value)
        return True

    def _settle(self, report, source):
        library.forget(self._handles[0])
        if report is not None and self._error is None:
            self._error = self._group._error(report)
        self._source = source
        if len(self._handles) == 1:
            self._land()
        # Only now: the operation is over once its results are in place.
        self._handles = self._handles[1:]

    def _land(self):
        if self._error is None:
            for land in self._landings:
                land()
        self._landings = self._tensors = ()

    def __del__(self):
        if not getattr(self, "_is_awaited", True):
            _kept[id(self)] = self  # it lives on, and this method is not called again
        elif getattr(self, "_handles", None):
            _forgotten[self._handles] = self._tensors

    def _release(self):
        """C++, which waits once, needs the work no more."""
        self._is_awaited = True
        _kept.pop(id(self), None)
        for tie in self._ties:
            tie.detach()
        self._ties = []

    def _tie_to_tensors(self):
        """From now on lives as long as its tensors: C++ that still waits for them has them."""
        tensors, self._result = list(_tensors_in(self._result)), None
        self._ties = [weakref.finalize(tensor, _let_go, self) for tensor in tensors]  # holds what it would call `_let_go` with
        if tensors:
            _kept.pop(id(self), None)


def _let_go(_work):
    """A tensor that kept a work has gone."""


def _tensors_in(result):
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result or ():
            yield from _tensors_in(part)


def sweep():
    """Forgets what forgotten works needed, once they are over."""
    for kept in list(_kept.values()):
        if kept._is_over(0) and not kept._is_awaited and not kept._ties:
            kept._tie_to_tensors()
    for handles in list(_forgotten):
        if all(library.wait(handle, 0, None) != library.PENDING for handle in handles):
            _forgotten.pop(handles, None)
            for handle in handles:
                library.forget(handle)


def _start_thread():
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_finish, name="paceline-futures", daemon=True)
            _thread.start()


def _finish():
    while handle := library.next_finished():
        work = _awaited.pop(handle, None)
        if work is not None:
            work._told()
            del work


def stop():
    """Ends the thread that completes futures, once all groups have ended."""
    if _thread is not None:
        library.notify(0)
        _thread.join(5)  # a program's callback may wait for what never comes


def _forked():
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _awaited.clear()
    _forgotten.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_forked)
