"""Which samples each shard reads, and a loader of this rank's shards.

The order is that of ``paceline indices --global-batch``, and so that of Paceline's own training: shard v of V reads every V-th sample of a
permutation, as rank v of V does with torch's ``DistributedSampler``, but no sample twice.
"""

import functools
import random
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from paceline.torch.tree import deal


class Shard(NamedTuple):
    """A micro-batch: its number among the shards of its global batch, its number of samples, and what the data set gave for them."""

    number: int
    samples: int
    batch: Any


class Shards(list):
    """This rank's shards of one global batch, which is cut in ``count``, without those that have no samples."""

    def __init__(self, shards, count, own, load):
        """``own`` are the numbers of the rank's shards; ``load`` gives a shard by its number, or None if it has no samples."""
        super().__init__(shards)
        self.count, self._own, self._load = count, own, load

    def deal(self, own):
        """The same batch for a rank with the shards ``own``; those that are not here are loaded."""
        if own == self._own:
            return self
        here = {shard.number: shard for shard in self}
        shards = (here.get(number) or self._load(number) for number in own)
        return Shards((shard for shard in shards if shard), self.count, own, self._load)


def mix(seed, a, b):
    """A seed of 64 bits that differs for every (seed, a, b)."""
    z = (seed * 0x9E3779B97F4A7C15 + a * 0xD1B54A32D192ED03 + b * 0x8CB92BA72F3D8DD7) % (1 << 64)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
    return z ^ z >> 31


def own_shards(shards, group=None):
    """The shards that this rank computes."""
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    if rank < 0:
        raise ValueError("this rank is not in the group")
    if shards < world:
        raise ValueError(f"{shards} shards are too few for {world} ranks: every rank needs at least one; use at least {world} shards")
    return deal(shards, world, rank)


class Sampler:
    """The steps of an epoch over ``length`` samples: in each step, every shard's samples.

    Each step takes ``batch_size`` samples over all shards. If that is no multiple of the shards, the first shards take one more. Every sample
    is read once an epoch, so in the last steps shards may have fewer samples, or none; with ``drop_last`` such steps are left out. Nothing
    depends on the number of ranks.
    """

    def __init__(self, length, batch_size, shards=8, seed=0, shuffle=True, drop_last=False):
        if length < 1 or shards < 1:
            raise ValueError(f"there must be samples and shards: length is {length}, shards is {shards}")
        if batch_size < shards:
            raise ValueError(
                f"batch size {batch_size} is smaller than the {shards} shards that share it; it counts the samples of all ranks"
            )
        self.length, self.batch_size, self.shards = length, batch_size, shards
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        shares = [(len(deal(length, shards, shard)), len(deal(batch_size, shards, shard))) for shard in range(shards)]
        self._steps = min(have // take for have, take in shares) if drop_last else max(-(-have // take) for have, take in shares)
        if not self._steps:
            raise ValueError(f"no full step: {length} samples over {shards} shards do not fill one batch of {batch_size}")

    def __len__(self):
        """Steps of an epoch."""
        return self._steps

    def order(self, epoch):
        """All samples in the order in which an epoch deals them to the shards."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed((self.seed + epoch) % (1 << 64)))

    def steps(self, epoch, first=0, shards=None):
        """For each step from ``first`` on, the lists of samples of ``shards``, by default of all of them."""
        order = self.order(epoch)
        lists = [
            (order[shard :: self.shards].tolist(), len(deal(self.batch_size, self.shards, shard)))
            for shard in (range(self.shards) if shards is None else shards)
        ]
        for step in range(first, self._steps):
            yield [own[step * take : (step + 1) * take] for own, take in lists]

    def indices(self, epoch, shard):
        """All samples that a shard reads in an epoch, in order."""
        return [sample for (own,) in self.steps(epoch, shards=[shard]) for sample in own]


class Loader:
    """Loads this rank's shards of each global batch of ``batch_size`` samples, for :meth:`SameBits.backward`.

    A loop over it is an epoch; the next loop is the next epoch, with another order, and needs no ``set_epoch``. A loop that ended early is gone
    on with by the next one. ``state_dict`` is the place after the newest batch, and any number of ranks can go on from there.

    Random numbers of the data set, such as those of augmentations, are seeded for each shard: those of torch's CPU generator, of Python's ``random``
    and of ``numpy.random``. ``shards``, ``seed``, ``shuffle`` and ``drop_last`` are those of :class:`Sampler`; the other options, such as ``num_workers``, those
    of torch's ``DataLoader``, which works below.
    """

    def __init__(self, dataset, batch_size, shards=8, seed=0, shuffle=True, drop_last=False, collate_fn=None, group=None, **options):
        if isinstance(dataset, IterableDataset):
            raise TypeError("an IterableDataset gives its samples in an order of its own; Loader needs a data set with indices")
        if not options.get("in_order", True):
            raise ValueError("in_order=False gives batches in the order of their arrival; a shard would get the samples of another one")
        self.sampler = Sampler(len(dataset), batch_size, shards, seed, shuffle, drop_last)
        self.epoch, self._step = 0, 0
        self._group, self._own = group, own_shards(shards, group)
        # Called between two steps, before a batch is read.
        self.before_batch = None
        # The list is another one in each epoch, and the workers may stay.
        self._keys = []
        self._source = _Source(dataset, collate_fn or torch.utils.data.default_collate, seed)
        options = {"generator": torch.Generator(), **options}
        self._loader = DataLoader(self._source, batch_size=None, sampler=self._keys, collate_fn=_as_it_is, **options)

    def __len__(self):
        """Steps of an epoch."""
        return len(self.sampler)

    def __iter__(self):
        epoch, turn = self.epoch, self._step
        batches = None
        while turn < len(self):
            if self.before_batch is not None:
                self.before_batch()
            own = own_shards(self.sampler.shards, self._group)
            if batches is None or own != self._own:
                self._own = own
                batches = self._read(epoch, turn)
            shards = next(batches)
            turn += 1
            self.epoch, self._step = (epoch, turn) if turn < len(self) else (epoch + 1, 0)
            yield shards

    def _read(self, epoch, first):
        """The batches of this rank from a step on."""
        steps = [
            [(number, samples) for number, samples in zip(self._own, step) if samples]
            for step in self.sampler.steps(epoch, first, self._own)
        ]
        self._keys[:] = [
            (epoch, turn, number, samples) for turn, step in enumerate(steps, first) for number, samples in step
        ]
        batches = iter(self._loader)
        for turn, step in enumerate(steps, first):
            shards = (Shard(number, len(samples), next(batches)) for number, samples in step)
            yield Shards(shards, self.sampler.shards, self._own, functools.partial(self._load, epoch, turn))

    def _load(self, epoch, turn, number):
        """A single shard, on the spot."""
        (samples,) = next(self.sampler.steps(epoch, turn, [number]))
        return Shard(number, len(samples), self._source[epoch, turn, number, samples]) if samples else None

    def set_epoch(self, epoch):
        """Goes to the start of an epoch, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self._step = epoch, 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self._step, **self._layout()}

    def load_state_dict(self, state):
        now = self._layout()
        other = {name: (state[name], value) for name, value in now.items() if state[name] != value}
        if other:
            words = ", ".join(f"{name} {saved} (now {value})" for name, (saved, value) in other.items())
            raise ValueError(f"the loader's state was saved with {words}; only the same settings read the rest of the samples")
        self.epoch, self._step = state["epoch"], state["step"]

    def _layout(self):
        names = ("length", "batch_size", "shards", "seed", "shuffle", "drop_last")
        return {name: getattr(self.sampler, name) for name in names}


class _Source:
    """A data set of shards, in a worker if there are any."""

    def __init__(self, dataset, collate, seed):
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, key):
        epoch, step, number, samples = key
        with _seeded(mix(mix(self._seed, epoch, step), number, 1)):
            if hasattr(self._dataset, "__getitems__"):
                return self._collate(self._dataset.__getitems__(samples))
            return self._collate([self._dataset[sample] for sample in samples])


@contextmanager
def _seeded(seed):
    """Seeds the generators that data sets use, and puts their states back afterwards."""
    states = random_states()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := _numpy_random():
        numpy.seed(seed % (1 << 32))
    try:
        yield
    finally:
        set_random_states(states)


def random_states():
    """Those of the generators that programs use: torch's, Python's and, if it is there, numpy's."""
    numpy = _numpy_random()
    return torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()


def set_random_states(states):
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] and (numpy := _numpy_random()):
        numpy.set_state(states[2])


def _numpy_random():
    return getattr(sys.modules.get("numpy"), "random", None)


def _as_it_is(batch):
    return batch


def cut(batch, shards, own):
    """The shards ``own`` of a global batch that all ranks have: shard v of V has the samples v, v + V, v + 2 V ... of each tensor in it."""
    lengths = set()
    _map(batch, lambda tensor: lengths.add(len(tensor)))
    if len(lengths) != 1:
        raise ValueError(f"the tensors of a batch must have as many rows as it has samples; these have {sorted(lengths)}")
    (samples,) = lengths

    def load(number):
        if number < samples:
            # A copy, because kernels may look at the alignment of what they read.
            part = _map(batch, lambda tensor: tensor[number::shards].clone())
            return Shard(number, len(range(number, samples, shards)), part)

    return Shards([], shards, range(0), load).deal(own)


def _map(batch, function):
    """The same batch with ``function`` of each tensor that has rows."""
    if isinstance(batch, torch.Tensor):
        return function(batch) if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [_map(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if batch is None or isinstance(batch, (bool, int, float)):
        return batch
    raise TypeError(f"a batch with a {type(batch).__name__} cannot be cut in shards; paceline.torch.Loader makes shards of any samples")
