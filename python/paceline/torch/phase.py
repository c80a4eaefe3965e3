"""What a rank does and at which step, for ``paceline run`` and for ranks that wait for it.

The program changes nothing: torch's own functions that begin and end a phase tell it. They are a batch from a ``DataLoader``, ``backward``,
and the step of an optimizer, of which the first one that steps is counted. With ``PACELINE_RUN_DIR`` the library records them there.
"""

import functools
import os
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from paceline import _library as library

# The group in which the phase is told; no group in a forked child, whose parent is the rank.
_handle = _process = None
_step = 0  # steps that are over
_counted = None
_installed = False


def tell(handle):
    """Tells the phases of this process in a group, from now on."""
    global _handle, _process
    _record(handle)
    _handle, _process = handle, os.getpid()
    _install()
    _enter(library.OWN_CODE)


def follow(handle, following):
    """Tells them in the next generation of the group."""
    global _handle
    if handle == _handle:
        _record(following)
        _handle = following


def _record(handle):
    folder = os.environ.get("PACELINE_RUN_DIR")
    if folder:
        library.record(handle, folder, _step)


def steps():
    """Steps that are over."""
    return _step


def go_on_after(steps):
    """In a process that goes on with the work of another one."""
    global _step
    _step = steps


def stop(handle):
    """Ends that, if this is the group."""
    global _handle
    if handle == _handle:
        _handle = None


def _enter(phase):
    if _handle is not None and _process == os.getpid():
        # The optimizer's step is the end of a step.
        library.set_phase(_handle, phase, _step if phase == library.OWN_CODE else _step + 1)


def _within(phase, function, then):
    """A function that is a phase, and what comes after it."""

    @functools.wraps(function)
    def told(*args, **kwargs):
        _enter(phase)
        after = library.OWN_CODE
        try:
            result = function(*args, **kwargs)
            after = then()
            return result
        finally:
            _enter(after)

    return told


def _with_batch():
    return library.FORWARD if torch.is_grad_enabled() else library.EVALUATION


def _stepped(optimizer, _args, _kwargs):
    global _step, _counted
    if _counted is None or _counted() is None:
        _counted = weakref.ref(optimizer)
    if _counted() is optimizer:
        _step += 1
    _enter(library.OWN_CODE)


def _install():
    global _installed
    if _installed:
        return
    _installed = True
    register_optimizer_step_post_hook(_stepped)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = _within(library.DATA_LOADER, iterator.__next__, _with_batch)
    torch.autograd.backward = _within(library.BACKWARD, torch.autograd.backward, lambda: library.OWN_CODE)
