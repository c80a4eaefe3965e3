"""Live recovery: the ranks that are left go on after one is lost, and a new process may take its place.

All ranks run the same commits in the same order: each :meth:`SameBits.backward` and :meth:`SameBits.with_recovery`. A commit ends with a
meeting, an all-reduce of one number. No two ranks can end in different steps:

1. A rank comes to the meeting only with all that the commit gives: every other operation of it is over by then.
2. No rank is through with an all-reduce before all ranks have taken part. So if one is, every other one has what the commit gives, and
   lacks the knowledge that it holds, and nothing else.
3. The next meeting needs all ranks again, so no two ranks are further apart than one commit.

When ranks are lost, the others form the next generation of the group and compare how many commits each has completed
(``crates/collective/src/settle.rs``). A rank that is behind completes the commit with what it has; if none is behind, all repeat the one that
they are in, from the state before it. The shards, their seeds and the tree of sums do not depend on the ranks, so the bits are the same. The
optimizer steps after a commit, so every rank steps once for each. The new generation runs no commit before all its ranks have compared, and
they are some of those before, so all this holds if ranks are lost while one forms.

A replacement joins between two steps, before the loader reads a batch. The wish to admit it is the number of the meeting, so all ranks agree
after the same commit. A generation that follows a loss has no new ranks, because the others may be within a step then.
"""

import io
import os
import zlib

import torch
import torch.distributed as dist

from paceline import _library as library
from paceline.torch.agree import bytes_of, refuse_differences
from paceline.torch.error import CollectiveError


class Lost(Exception):
    """The group has lost a rank, which a rank has seen between two operations."""


class Live:
    """The commits of a rank.

    ``facts`` must be the same on all ranks. ``adopt`` is called with what holds in each new generation, to deal the work anew; ``give`` makes the
    state that a replacement gets, and ``take`` has it there.
    """

    def __init__(self, group, facts, adopt, give, take):
        self._group, self._facts, self._adopt, self._give, self._take = group, facts, adopt, give, take
        self.completed = 0
        self._is_invited = False

    def join(self):
        """Waits, in a replacement, until the others take it in, and takes over the state of one of them."""
        while True:
            settled = self._regroup(library.NEW)
            try:
                facts, state = self._receive(settled["giver"])
                self.look()
                break
            except (CollectiveError, Lost):
                # The others have gone on without this one, and come back to it after their step.
                self._require_lost()
        refuse_differences({settled["giver"]: facts, self._group.rank(): self._facts})
        self._group.declare_joined()
        self.completed = settled["completed"]
        self._take(state)
        self._adopt(settled)

    def look(self):
        """Raises :class:`Lost` if a rank is lost."""
        if self._group.outlook() == library.LOST:
            raise Lost

    def commit(self, attempt, undo):
        """What ``attempt`` gives, which is called again, after ``undo``, if ranks are lost meanwhile."""
        while True:
            outcome = None
            try:
                outcome = (attempt(),)
                self._meet()
                break
            except (CollectiveError, Lost):
                self._require_lost()
            settled = self._regroup(library.WITHIN)
            self._adopt(settled)
            if settled["completed"] == self.completed:
                undo()
            elif outcome is None:
                raise RuntimeError("another rank is a step ahead; all ranks must call SameBits.backward and SameBits.with_recovery in the same order")
            else:
                break
        self.completed += 1
        return outcome[0]

    def admit(self):
        """Takes in replacements, if the ranks have agreed on that in their last commit. All call it between two steps."""
        if not self._is_invited:
            self._group.wait_while_held()
            return
        settled = self._regroup(library.BETWEEN)
        if settled["giver"] == self._group.rank() and settled["new"]:
            try:
                self._send(settled["new"])
            except CollectiveError:
                self._require_lost()  # the next operation finds out
        self._adopt(settled)

    def _meet(self):
        wish = torch.tensor([self._group.outlook() == library.INVITED], dtype=torch.int64)
        dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._group)
        self._is_invited = bool(wish)

    def _regroup(self, place):
        """Goes on with the next generation, or the one after it if ranks are lost meanwhile, and gives what holds in it."""
        while True:
            self._group.succeed()
            self._is_invited = False
            try:
                return self._group.settle(place, self.completed)
            except CollectiveError:
                self._require_lost()

    def _require_lost(self):
        """Raises the error that is being handled, unless the others can go on without a lost rank."""
        if self._group.outlook() != library.LOST:
            raise

    def _send(self, new):
        state = io.BytesIO()
        torch.save((self._facts, self._give()), state)
        state = torch.frombuffer(state.getbuffer(), dtype=torch.uint8)
        head = torch.tensor([state.nbytes, zlib.crc32(bytes_of(state))])
        for rank in new:
            dist.send(head, rank, group=self._group)
            dist.send(state, rank, group=self._group)

    def _receive(self, giver):
        if giver is None:
            raise RuntimeError("no rank has the job's state")
        head = torch.zeros(2, dtype=torch.int64)
        dist.recv(head, giver, group=self._group)
        size, checksum = head.tolist()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not 0 < size <= memory:
            raise RuntimeError(f"rank {giver} sends a state of {size} bytes, and this machine has {memory} bytes of memory")
        state = torch.empty(size, dtype=torch.uint8)
        dist.recv(state, giver, group=self._group)
        if zlib.crc32(bytes_of(state)) != checksum:
            raise RuntimeError(f"the state from rank {giver} does not have the checksum that it sent")
        # The giver has proved that it belongs to the job.
        return torch.load(io.BytesIO(bytes_of(state)), weights_only=False)

