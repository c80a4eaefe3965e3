"""Sums over all shards, along their tree, whatever the number of ranks and the backend of the group."""

import os

import torch
import torch.distributed as dist

from paceline.torch.group import Group
from paceline.torch.tree import blocks, deal, fold, merges


class Sums:
    """The sum of one vector of each shard.

    A rank fills :meth:`row` and calls :meth:`push` for each of its shards in order, and then :meth:`total`. It keeps as many rows as the tree
    needs: at most the logarithm of its shards, plus one.
    """

    def __init__(self, shards, group, length, dtype):
        self._group = group
        self._rank, self._world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._tree = range(shards)
        self._blocks = [blocks(self._tree, deal(shards, self._world, rank)) for rank in range(self._world)]
        self._merges = [count for block in self._blocks[self._rank] for count in merges(block)]
        self._in_place = isinstance(group, Group) and self._is_plain()
        # Otherwise each rank adds a slice of all ranks' rows.
        self._slice = -(-length // self._world)
        self._rows, self._received, self._dtype = [], None, dtype
        self._filled = self._pushed = 0

    def row(self):
        """Where the next shard's vector goes. It may be longer than asked for; what is behind does not matter."""
        if self._filled == len(self._rows):
            self._rows.append(torch.zeros(self._slice * self._world, dtype=self._dtype))
        return self._rows[self._filled]

    def push(self):
        """Adds the row that was filled to those before, as far as this rank owns the tree."""
        for _ in range(self._merges[self._pushed]):
            self._rows[self._filled - 1].add_(self._rows[self._filled])
            self._filled -= 1
        self._filled += 1
        self._pushed += 1

    def total(self):
        """The sum over all shards; the memory is used again for the next one."""
        rows = self._rows[: self._filled]
        self.reset()
        if self._in_place:
            dist.all_reduce(rows[0], group=self._group)
        elif self._world > 1:
            self._exchange(rows)
        return rows[0]

    def reset(self):
        """Forgets what was pushed."""
        self._filled = self._pushed = 0

    def _is_plain(self):
        """Whether the ranks' sums combine as those of single shards would: then Paceline's own all-reduce adds along the tree."""
        if "ring" in os.environ.get("PACELINE_ALGORITHM", "") or any(len(own) > 1 for own in self._blocks):
            return False
        by_block = {own[0]: rank for rank, own in enumerate(self._blocks)}
        by_rank = {range(rank, rank + 1): rank for rank in range(self._world)}

        def pair(left, right):
            return left, right

        return fold(self._tree, by_block, pair) == fold(range(self._world), by_rank, pair)

    def _exchange(self, rows):
        counts = [len(own) * self._slice for own in self._blocks]
        # For each rank its slice of all rows.
        sent = rows[0] if len(rows) == 1 else torch.stack([row.view(self._world, self._slice) for row in rows], dim=1).flatten()
        if self._received is None:
            self._received = torch.empty(sum(counts), dtype=self._dtype)
        dist.all_to_all_single(self._received, sent, counts, [len(rows) * self._slice] * self._world, group=self._group)
        nodes = [node for own in self._blocks for node in own]
        sums = dict(zip(nodes, self._received.view(-1, self._slice).unbind()))
        dist.all_gather_into_tensor(rows[0], fold(self._tree, sums, torch.Tensor.add_), group=self._group)
