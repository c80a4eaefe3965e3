"""The functions of Paceline's library, through ctypes, which lets other Python threads run during a call.

``crates/python/src/abi.rs`` and ``call.rs`` say what they do.
"""

import ctypes
import json
import os

OK, FAILED, PENDING = range(3)

ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, ALL_TO_ALL_V, BARRIER, SEND, RECV = range(1, 13)

RECOVERS, ADMITS, JOINED = range(1, 4)
IN_ORDER, LOST, INVITED, JOINING = range(4)
WITHIN, BETWEEN, NEW = range(3)

OWN_CODE, DATA_LOADER, FORWARD, BACKWARD, EVALUATION = range(1, 6)


class Span(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class Call(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("tag", ctypes.c_uint32),
        ("peer", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("timeout_ms", ctypes.c_uint64),
        ("inputs", ctypes.POINTER(Span)),
        ("inputs_len", ctypes.c_size_t),
        ("outputs", ctypes.POINTER(Span)),
        ("outputs_len", ctypes.c_size_t),
    ]


def _load():
    path = os.path.join(os.path.dirname(__file__), "libpaceline_python.so")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"cannot load Paceline's library: {error}; install the package with `pip install .` in the checkout") from error
    handle, status, size, text = ctypes.c_uint64, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
    to_handle, to_rank = ctypes.POINTER(handle), ctypes.POINTER(ctypes.c_int64)
    call = ctypes.POINTER(Call)
    functions = {
        "version": (text,),
        "text": (text,),
        "host": (status, text, size, to_handle),
        "join": (status, text, size, handle, to_handle),
        "subgroup": (status, handle, text, size, to_handle, size, ctypes.c_uint64, to_handle),
        "run": (status, handle, call, to_rank),
        "submit": (status, handle, call, to_handle),
        "wait": (status, handle, ctypes.c_int64, to_rank),
        "notify": (status, handle),
        "next_finished": (status, ctypes.c_uint64, to_handle),
        "forget": (status, handle),
        "set_timeout": (status, handle, ctypes.c_uint64),
        "set_phase": (status, handle, ctypes.c_uint32, ctypes.c_uint64),
        "record": (status, handle, text, size, ctypes.c_uint64),
        "declare": (status, handle, ctypes.c_uint32),
        "outlook": (status, handle, ctypes.POINTER(ctypes.c_uint32)),
        "wait_while_held": (status, handle),
        "next_generation": (status, handle, to_handle),
        "settle": (status, handle, ctypes.c_uint32, ctypes.c_uint64),
        "abort": (status, handle, text, size),
        "close": (status, handle, text, size),
        "track": (status, text, size),
        "tracked": (status,),
        "track_end": (status,),
    }
    for name, (result, *arguments) in functions.items():
        function = getattr(library, f"paceline_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
run, submit, wait, forget = _library.paceline_run, _library.paceline_submit, _library.paceline_wait, _library.paceline_forget
notify, set_phase = _library.paceline_notify, _library.paceline_set_phase


class Failure(RuntimeError):
    """A failure as the library reports it: ``report`` has its parts."""

    def __init__(self, report):
        super().__init__(report["message"])
        self.report = report


def report(kind, message, culprits=()):
    """The report of a failure that the library has no part in."""
    return {"kind": kind, "message": message, "hint": None, "culprits": list(culprits), "hosts": [], "operation": None}


def text():
    """The last result or report of this thread."""
    return json.loads(_library.paceline_text())


def check(status):
    """Raises the failure of a call that failed."""
    if status == FAILED:
        raise Failure(text())


def version():
    return _library.paceline_version().decode()


def host(settings):
    """Hosts a group's store: its handle, and what the other ranks need to know."""
    settings, server = json.dumps(settings).encode(), ctypes.c_uint64()
    check(_library.paceline_host(settings, len(settings), server))
    return server.value, text()


def join(settings, server):
    settings, group = json.dumps(settings).encode(), ctypes.c_uint64()
    check(_library.paceline_join(settings, len(settings), server, group))
    return group.value


def subgroup(parent, name, members, timeout_ms):
    name, group = name.encode(), ctypes.c_uint64()
    array = (ctypes.c_uint64 * len(members))(*members)
    check(_library.paceline_subgroup(parent, name, len(name), array, len(members), timeout_ms, group))
    return group.value


def next_finished():
    """Waits for a work that :data:`notify` was called for. 0 is nobody's."""
    work = ctypes.c_uint64()
    while _library.paceline_next_finished(3_600_000, work) == PENDING:
        pass
    return work.value


def set_timeout(group, timeout_ms):
    check(_library.paceline_set_timeout(group, timeout_ms))


def record(group, folder, steps):
    folder = os.fsencode(folder)
    check(_library.paceline_record(group, folder, len(folder), steps))


def declare(group, word):
    """Whether the launcher has heard it."""
    status = _library.paceline_declare(group, word)
    check(status)
    return status == OK


def outlook(group):
    outlook = ctypes.c_uint32()
    check(_library.paceline_outlook(group, outlook))
    return outlook.value


def wait_while_held(group):
    check(_library.paceline_wait_while_held(group))


def next_generation(group):
    """The group after this one, and where this process is in it."""
    following = ctypes.c_uint64()
    check(_library.paceline_next_generation(group, following))
    return following.value, text()


def settle(group, place, completed):
    check(_library.paceline_settle(group, place, completed))
    return text()


def abort(group, why):
    why = why.encode()
    check(_library.paceline_abort(group, why, len(why)))


def close(group, why=""):
    why = why.encode()
    check(_library.paceline_close(group, why, len(why)))


def track(settings):
    settings = json.dumps(settings).encode()
    check(_library.paceline_track(settings, len(settings)))


def tracked():
    """What the tracker has to tell so far: its report, and the report's text."""
    check(_library.paceline_tracked())
    return text()


def track_end():
    check(_library.paceline_track_end())
    return text()
