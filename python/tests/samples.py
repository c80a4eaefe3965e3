"""Sampler and Loader read the samples of `paceline indices`, whoever loads them.

Usage: samples.py [NAME...]: all cases, or those with a name in the list. `cargo test -p paceline-python` runs it if PACELINE_TEST_PYTHON is a
Python with torch. PACELINE_PROGRAM is a program `paceline` to compare with; without it there are numbers that it has printed.
"""

import os
import random
import subprocess

try:
    import numpy
except ImportError:
    numpy = None
import torch
from forked import main, raises, ranks
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from paceline.torch import Loader, Sampler


class Noisy(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, sample):
        return sample + torch.rand(()), random.random(), numpy.random.rand() if numpy else 0.0


def samples_have_the_same_random_numbers_in_any_worker():
    def epochs(workers):
        loader = Loader(Noisy(), 8, 4, num_workers=workers, persistent_workers=workers > 0)
        return [(shard.number, *(part.tolist() for part in shard.batch)) for _ in range(2) for step in loader for shard in step]

    torch.manual_seed(2)
    expected = epochs(0)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(2)))
    assert epochs(2) == expected
    assert sorted(sum(ranks(3, epochs, 0), [])) == sorted(expected)


# What `paceline indices --global-batch` printed: the options, and each shard's samples.
PRINTED = [
    ((11, 6, 4, 3, True, False), 2, [[9, 10, 7], [5, 2, 1], [0, 3, 4], [8, 6]]),
    ((11, 6, 4, 3, True, True), 2, [[9, 10], [5, 2], [0], [8]]),
    ((11, 5, 4, 3, False, False), 2, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]),
]


def samples_are_those_of_paceline_indices():
    for options, epoch, expected in PRINTED:
        assert [Sampler(*options).indices(epoch, shard) for shard in range(options[2])] == expected, options
    # Without a global batch it prints those of torch.
    own = DistributedSampler(range(12), 4, 1, seed=3)
    own.set_epoch(2)
    assert list(own) == Sampler(12, 4, 4, 3).indices(2, 1)
    program = os.environ.get("PACELINE_PROGRAM")
    if not program:
        print("PACELINE_PROGRAM is not set: compared with written numbers only")
        return
    for turn in range(40):
        chance = random.Random(turn)
        length, shards, seed, epoch = chance.randint(30, 200), chance.randint(1, 9), chance.randint(0, 99), chance.randint(0, 4)
        batch, shard, shuffle, drop = shards + chance.randint(0, 20), chance.randrange(shards), turn % 3 > 0, turn % 2 > 0
        numbers = {"len": length, "world": shards, "rank": shard, "seed": seed, "epoch": epoch, "global-batch": batch}
        words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        words += ["--drop-last"] * drop + ["--no-shuffle"] * (not shuffle)
        said = subprocess.run([program, "indices", *words], capture_output=True, text=True, check=True).stdout
        assert Sampler(length, batch, shards, seed, shuffle, drop).indices(epoch, shard) == [int(line) for line in said.split()], words


def loops_go_on_where_they_stopped():
    data = TensorDataset(torch.arange(10))

    def read(loader, steps=None):
        seen = []
        for step in loader:
            seen.append([(shard.number, shard.batch[0].tolist()) for shard in step])
            if len(seen) == steps:
                break
        return seen

    whole = Loader(data, 4, 2)
    epochs = [read(whole), read(whole)]
    assert len(whole) == 3 and epochs[0] != epochs[1] and whole.state_dict()["epoch"] == 2
    assert sorted(sum((rows for step in epochs[0] for _, rows in step), [])) == list(range(10))
    first = Loader(data, 4, 2)
    assert read(first, 1) == epochs[0][:1]
    other = Loader(data, 4, 2, num_workers=1)
    other.load_state_dict(first.state_dict())
    assert read(other) == epochs[0][1:] and read(other) == epochs[1]
    raises(ValueError, lambda: Loader(data, 6, 2).load_state_dict(first.state_dict()), "batch_size 4 (now 6)")
    raises(ValueError, lambda: Loader(data, 8, in_order=False), "samples of another one")
    raises(ValueError, lambda: Loader(data, 4), "smaller than the 8 shards")


if __name__ == "__main__":
    main(
        samples_have_the_same_random_numbers_in_any_worker,
        samples_are_those_of_paceline_indices,
        loops_go_on_where_they_stopped,
    )
