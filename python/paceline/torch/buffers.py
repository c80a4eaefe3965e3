"""A model's buffers, such as the running statistics of batch norm, over the shards of a step.

Every shard begins with the buffers of the step before. Afterwards those that shards have changed become the mean over all shards if they are
numbers with fractions. Whole numbers, such as counts of batches, must have changed alike, and count once.
"""

import torch
import torch.distributed as dist

from paceline.torch.sums import Sums

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """The buffers before a step, and what this rank's shards made of them."""

    def __init__(self, model):
        # A buffer may be in several places, and a forward pass may put another tensor in its place.
        self._places, self._names = [], {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places.append((module, name, buffer))
                    self._names.setdefault(buffer, f"{prefix}.{name}".lstrip("."))
        self._before = [buffer.clone() for buffer in self._names]
        self._after = []

    def __len__(self):
        return len(self._before)

    def undo(self):
        """Puts everything back as it was before the step, and forgets its shards."""
        self._restore()
        self._after.clear()

    def _restore(self):
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        for buffer, before in zip(self._names, self._before):
            buffer.copy_(before)

    def take(self, weight):
        """Notes what a shard has changed, and restores it."""
        now = {}
        for module, name, buffer in self._places:
            now.setdefault(buffer, module._buffers[name])
        changed = {}
        for place, (before, after) in enumerate(zip(self._before, now.values())):
            # A cache that has grown belongs to the shard alone.
            if after is not None and after.shape == before.shape and after.dtype == before.dtype and not _same_bits(before, after):
                changed[place] = after.clone()
        self._after.append((weight, changed))
        self._restore()

    def skip(self):
        """A shard without samples."""
        self._after.append((0, {}))

    def changed(self):
        """For each buffer, whether a shard of this rank changed it, as numbers to be added over ranks."""
        return [any(place in changed for _, changed in self._after) for place in range(len(self))]

    def average(self, places, shards, group, weight):
        """Writes what the shards of all ranks make of the buffers at ``places``, the same list on all ranks."""
        buffers = list(self._names)
        fractions = [place for place in places if buffers[place].is_floating_point() or buffers[place].is_complex()]
        counts = [place for place in places if place not in fractions]
        if fractions:
            self._average(buffers, fractions, shards, group, weight)
        if counts:
            self._agree(buffers, counts, group)

    def _average(self, buffers, places, shards, group, weight):
        sizes = [_numbers(self._before[place]).numel() for place in places]
        sums = Sums(shards, group, sum(sizes), torch.float64)
        for own, changed in self._after:
            row = sums.row()
            if own:
                values = [_numbers(changed.get(place, self._before[place])) for place in places]
                torch.cat([value.double() for value in values], out=row[: sum(sizes)]).mul_(own)
            else:
                row.zero_()
            sums.push()
        means = sums.total()[: sum(sizes)].div_(weight).split(sizes)
        for place, mean in zip(places, means):
            whole = torch.view_as_complex(mean.view(-1, 2)) if buffers[place].is_complex() else mean
            buffers[place].copy_(whole.view(buffers[place].shape))

    def _agree(self, buffers, places, group):
        sizes = [self._before[place].numel() for place in places]
        extremes = torch.full((2, sum(sizes)), torch.iinfo(torch.int64).min)
        for own, changed in self._after:
            if own:
                values = torch.cat([changed.get(place, self._before[place]).flatten().long() for place in places])
                torch.maximum(extremes, torch.stack([values, -values]), out=extremes)
        if group is not None:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        for place, most, least in zip(places, extremes[0].split(sizes), extremes[1].neg().split(sizes)):
            if not torch.equal(most, least):
                name = self._names[buffers[place]]
                raise RuntimeError(f"shards leave different whole numbers in the buffer {name}, and those have no mean")
            buffers[place].copy_(most.view(buffers[place].shape))


def _numbers(buffer):
    return (torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer).flatten()


def _same_bits(one, other):
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
