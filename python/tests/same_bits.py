"""SameBits ends with the same weights on 1, 2, 3, 4 and 8 ranks, and says so where it cannot.

Usage: same_bits.py [NAME...]: all cases, or those with a name in the list. Each rank is a forked process. `cargo test -p paceline-python` runs
it if PACELINE_TEST_PYTHON is a Python with torch. PACELINE_PROGRAM is a program `paceline` to compare the samples with.
"""

import faulthandler
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from paceline.torch import Loader, SameBits, Sampler, weights_hash

FORK = multiprocessing.get_context("fork")
WORLDS = (1, 2, 3, 4, 8)


def ranks(world, function, *args, backend="paceline"):
    """What a function returns on each of so many ranks; without a group if it is one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = FORK.SimpleQueue()

    def main(rank):
        faulthandler.dump_traceback_later(200, exit=True)
        torch.set_num_threads(1)
        if world > 1:
            address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=limit)
        results.put((rank, function(*args)))
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()

    processes = [FORK.Process(target=main, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
    return [result for _, result in sorted(results.get() for _ in range(world))]


def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("it did not fail")


def build(kind, seed=0):
    """A model with weights from a seed, and the data for it: 29 samples, which no number of ranks divides."""
    torch.manual_seed(seed)
    if kind == "mlp":
        return models.mlp(), models.vectors(29)
    if kind == "resnet20":
        return models.resnet20(4), models.images(29)
    return models.GPT(), models.texts(29)


def train(kind, shards=8, epochs=2, accumulate=1, amp=False, clip=None, schedule=False, workers=0, whole=False, weigh=False):
    """Trains a little, and gives a hash of the weights, the buffers and all losses."""
    model, data = build(kind, seed=0 if not dist.is_initialized() else dist.get_rank())
    same = SameBits(model, shards, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if kind == "gpt" else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None
    loader = Loader(data, 16, shards, seed=1, num_workers=workers)
    mean_loss, losses = models.loss_of(model), []

    def loss_of(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = mean_loss(batch)
        return (loss, (batch[1] % 3 == 0).sum()) if weigh else loss

    def batches():
        if not whole:
            return loader
        order = loader.sampler.order(loader.epoch)
        loader.set_epoch(loader.epoch + 1)
        return [data[order[first : first + 16]] for first in range(0, len(data), 16)]

    for _ in range(epochs):
        for turn, batch in enumerate(batches(), 1):
            losses.append(same.backward(batch, loss_of))
            if turn % accumulate:
                continue
            if clip:
                losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    return weights_hash(model)[:16], losses


SCENES = {
    "mlp": {"kind": "mlp"},
    "resnet20 with batch norm": {"kind": "resnet20", "epochs": 1},
    "gpt with dropout": {"kind": "gpt", "epochs": 1},
    "accumulation": {"kind": "gpt", "accumulate": 2},
    "bf16 autocast": {"kind": "gpt", "amp": True, "epochs": 1},
    "bf16 autocast with batch norm": {"kind": "resnet20", "amp": True, "epochs": 1},
    "clipping and a scheduler": {"kind": "mlp", "clip": 0.5, "schedule": True},
    "11 shards": {"kind": "mlp", "shards": 11},
    "weights other than samples": {"kind": "gpt", "weigh": True, "epochs": 1},
    "whole batches": {"kind": "gpt", "whole": True, "epochs": 1},
}


def all_scenes():
    return {name: train(**scene) for name, scene in SCENES.items()}


def same_bits_on_any_number_of_ranks():
    expected = all_scenes()
    for world in WORLDS:
        for result in ranks(world, all_scenes):
            for name, outcome in result.items():
                assert outcome == expected[name], (world, name, outcome, expected[name])
    assert expected["whole batches"] == expected["gpt with dropout"], "the loader cuts a batch as SameBits does"
    assert len({outcome[0] for outcome in expected.values()}) == len(expected) - 1, "the scenes do not test one thing twice"


def same_bits_with_gloo():
    scene = SCENES["resnet20 with batch norm"]
    assert {outcome[0] for outcome in ranks(3, lambda: train(**scene), backend="gloo")} == {train(**scene)[0]}


def fewer_shards_than_ranks_are_refused():
    ranks(3, lambda: raises(ValueError, lambda: SameBits(models.mlp(), shards=2), "2 shards are too few for 3 ranks"))
    assert {outcome[0] for outcome in ranks(3, lambda: train("mlp", shards=3))} == {train("mlp", shards=3)[0]}


def train_with_ddp():
    model, data = build("mlp")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for first in range(0, 24, 8):
        batch = data[first + rank : first + 8 : world]
        optimizer.zero_grad()
        models.loss_of(wrapped)(batch).backward()
        optimizer.step()
    return weights_hash(model)


def plain_ddp_gives_other_bits():
    hashes = {ranks(world, train_with_ddp)[0] for world in (1, 2, 4)}
    assert len(hashes) > 1, "otherwise these tests prove nothing"


def resume(stop, folder, save):
    """Trains until a step, from the last state if there is one."""
    model, data = build("resnet20")
    same, loader = SameBits(model, 8), Loader(data, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parts, path = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "same": same, "loader": loader}, f"{folder}/state.pt"
    if os.path.exists(path):
        state = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    steps = same.state_dict()["batches"]
    while steps < stop:
        for batch in loader:
            optimizer.zero_grad()
            same.backward(batch, lambda batch: torch.nn.functional.dropout(models.loss_of(model)(batch)))
            optimizer.step()
            scheduler.step()
            steps += 1
            if steps == stop:
                break
    if save and (not dist.is_initialized() or dist.get_rank() == 0):
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    return weights_hash(model)


def a_run_goes_on_on_another_number_of_ranks():
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        ranks(2, resume, 6, folder, True)
        assert ranks(3, resume, 9, folder, False) == [ranks(1, resume, 9, empty, False)[0]] * 3


def differences_between_ranks_are_named():
    def threads():
        torch.set_num_threads(1 + dist.get_rank())
        raises(ValueError, lambda: SameBits(models.mlp()), "ranks differ in torch threads: rank 0 has 1, rank 1 has 2", "set_num_threads(1)")

    def model():
        raises(ValueError, lambda: SameBits(models.mlp(8 + dist.get_rank())), "ranks differ in names, shapes or types")

    def seed():
        raises(ValueError, lambda: SameBits(models.mlp(), seed=dist.get_rank()), "ranks differ in seed: rank 0 has 0, rank 1 has 1")

    def place():
        net = models.mlp()
        same = SameBits(net)
        if dist.get_rank() == 1:
            same.load_state_dict({**same.state_dict(), "batches": 4})
        raises(RuntimeError, lambda: same.backward(models.vectors(8)[:], models.loss_of(net)), "different batches: [0, 0, 0, 0, 4, 4, 4, 4]")

    for case in (threads, model, seed, place):
        ranks(2, case)


def models_in_parts_are_refused():
    def case():
        dist.init_device_mesh("cpu", (2,))
        raises(TypeError, lambda: SameBits(DistributedDataParallel(models.mlp())), "give it the module inside")
        raises(TypeError, lambda: SameBits(fully_shard(models.mlp())), "divided among the ranks")
        raises(TypeError, lambda: SameBits(torch.nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet20(4))), "SyncBatchNorm", "use BatchNorm")
        raises(TypeError, lambda: SameBits(torch.nn.Linear(2, 2, device="meta")), "is on meta")
        table = torch.nn.Embedding(8, 2, sparse=True)
        raises(TypeError, lambda: SameBits(table).backward(torch.arange(8), lambda rows: table(rows).sum()), "sparse")

    ranks(2, case)


def one_shard_is_plain_torch():
    """Nothing is scaled then, so a single rank gets the bits of a program without SameBits."""
    (one, data), (other, _) = build("mlp"), build("mlp")
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (one, other)]
    same = SameBits(one, shards=1)
    for batch in (data[:9], data[9:20]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain = models.loss_of(other)(batch)
        plain.backward()
        assert same.backward(batch, models.loss_of(one)) == plain.item()
        for optimizer in optimizers:
            optimizer.step()
    assert weights_hash(one) == weights_hash(other)


def means_are_those_of_the_samples():
    """In numbers: uneven shards weigh their samples, statistics are means of the shards', and counts count once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=0.5), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    same, rows = SameBits(model, shards=4), torch.randn(11, 2, dtype=torch.float32)
    model[2].bias.requires_grad_(False)
    means = torch.zeros(2)
    for shard in range(4):
        part = rows[shard::4]
        means += len(part) / 11 * 0.5 * part.mean(0)
    same.backward(rows, lambda rows: model[1](model[0](rows)).pow(2).mean())
    assert torch.allclose(model[0].running_mean, means) and model[0].num_batches_tracked == 1
    assert model[2].weight.grad is None and model[2].bias.grad is None, "no shard has used them"
    model.eval()
    (plain,) = torch.autograd.grad(model[1](model[0](rows)).pow(2).mean(), model[1].weight)
    model[1].weight.grad = None
    same.backward(rows, lambda rows: model[1](model[0](rows)).pow(2).mean())
    assert torch.allclose(model[1].weight.grad, plain)
    same.backward(rows, lambda rows: model[1](model[0](rows)).pow(2).mean())
    assert torch.allclose(model[1].weight.grad, 2 * plain), "gradients are added to those that are there"


def types_of_numbers_other_than_float32():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.small = torch.nn.Parameter(torch.linspace(0, 1, 7).bfloat16())
            self.large = torch.nn.Parameter(torch.linspace(0, 1, 7).double())
            self.wave = torch.nn.Parameter(torch.full((7,), 1 + 2j))
            self.register_buffer("mean", torch.zeros(7, dtype=torch.complex64))
            self.register_buffer("calls", torch.tensor(0, dtype=torch.int32))
            self.register_buffer("seen", torch.tensor(False))

        def forward(self, rows):
            value = rows * self.small.float() * self.large * self.wave
            self.calls += 1
            self.seen |= True
            self.mean = self.mean + value.detach().mean(0).to(torch.complex64)  # another tensor in its place
            return value.abs().mean()

    def step():
        model = Mixed()
        kept = model.mean
        SameBits(model, shards=3).backward(torch.randn(10, 7, generator=torch.Generator().manual_seed(1)), model)
        assert model.mean is kept and model.mean.abs().sum() > 0 and model.calls == 1 and model.seen
        return [parameter.grad.tolist() for parameter in model.parameters()], weights_hash(model)

    assert ranks(2, step) == [step()] * 2


def errors_leave_things_as_they_were():
    model, data = build("resnet20")
    same, before, calls = SameBits(model, shards=4), weights_hash(model), []
    model[-1].bias.grad = torch.ones(10)
    torch.manual_seed(9)

    def loss_of(batch):
        calls.append(torch.rand(1))
        loss = models.loss_of(model)(batch)
        return loss if len(calls) < 3 else loss.no_such_thing

    raises(AttributeError, lambda: same.backward(data[:8], loss_of), "no_such_thing")
    assert weights_hash(model) == before and model[-1].bias.grad.tolist() == [1] * 10 and model[-1].weight.grad is None
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(9))), "the program's random numbers go on"
    calls.clear()
    same.backward(data[:8], lambda batch: models.loss_of(model)(batch))
    assert same.state_dict()["batches"] == 1
    raises(ValueError, lambda: same.backward((torch.ones(3), torch.ones(4)), loss_of), "as many rows", "[3, 4]")
    raises(TypeError, lambda: same.backward((torch.ones(3), ["a"] * 3), loss_of), "a str cannot be cut")
    model.register_buffer("queue", torch.zeros(1, dtype=torch.long))

    def counts_samples(batch):
        model.queue += len(batch[0])
        return models.loss_of(model)(batch)

    raises(RuntimeError, lambda: same.backward(data[:5], counts_samples), "in the buffer queue")


class Noisy(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, sample):
        return sample + torch.rand(()), random.random(), torch.randint(100, ())


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
    raises(ValueError, lambda: Loader(data, 4), "smaller than the 8 shards")


def main():
    wanted = sys.argv[1:]
    failures = 0
    torch.set_num_threads(1)
    tests = [
        same_bits_on_any_number_of_ranks,
        same_bits_with_gloo,
        fewer_shards_than_ranks_are_refused,
        plain_ddp_gives_other_bits,
        a_run_goes_on_on_another_number_of_ranks,
        differences_between_ranks_are_named,
        models_in_parts_are_refused,
        one_shard_is_plain_torch,
        means_are_those_of_the_samples,
        types_of_numbers_other_than_float32,
        errors_leave_things_as_they_were,
        samples_have_the_same_random_numbers_in_any_worker,
        samples_are_those_of_paceline_indices,
        loops_go_on_where_they_stopped,
    ]
    for test in tests:
        if wanted and not any(word in test.__name__ for word in wanted):
            continue
        started = time.monotonic()
        try:
            test()
            outcome = "ok"
        except Exception:
            traceback.print_exc()
            outcome, failures = "FAILED", failures + 1
        print(f"{test.__name__} ... {outcome} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
