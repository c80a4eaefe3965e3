"""SameBits ends with the same weights on 1, 2, 3, 4 and 8 ranks, and says so where it cannot.

Usage: same_bits.py [NAME...]: all cases, or those with a name in the list. Each rank is a forked process. `cargo test -p paceline-python` runs
it if PACELINE_TEST_PYTHON is a Python with torch.
"""

import os
import tempfile
import warnings

import models
import torch
import torch.distributed as dist
from forked import main, raises, ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Loader, SameBits, weights_hash
from paceline.torch.tree import blocks, deal, fold

WORLDS = (1, 2, 3, 4, 8)


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


def same_bits_with_gloo_over_tcp_and_with_rings():
    """Rings would add in another order, so SameBits does not use them."""

    def scene():
        return train(**SCENES["resnet20 with batch norm"])[0]

    ends = {scene(), *ranks(3, scene, backend="gloo"), *ranks(4, scene, backend="gloo")}
    for name, value in (("PACELINE_TRANSPORT", "tcp"), ("PACELINE_ALGORITHM", "allreduce:ring")):
        os.environ[name] = value
        ends |= {*ranks(4, scene), *ranks(3, scene)}
        del os.environ[name]
    assert len(ends) == 1, ends


def train_with_zero_and_a_scaler():
    model, data = build("mlp")
    same, parts = SameBits(model), {"optimizer_class": torch.optim.AdamW, "lr": 1e-2}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **parts) if dist.is_initialized() else torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16):
            return scaler.scale(models.loss_of(model)(batch))

    for batch in Loader(data, 16):
        optimizer.zero_grad()
        same.backward(batch, loss_of)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return weights_hash(model)


def sharded_optimizers_and_gradient_scalers_work():
    assert len({end for world in (1, 2, 3) for end in ranks(world, train_with_zero_and_a_scaler)}) == 1


def sums_follow_the_tree_of_the_rust_side():
    """What `Tree::split(8, 3)` and its like give in `crates/collective/src/tree.rs`."""
    assert [blocks(range(8), deal(8, 3, rank)) for rank in range(3)] == [[range(2), range(2, 3)], [range(3, 4), range(4, 6)], [range(6, 8)]]
    words = {range(leaf, leaf + 1): str(leaf) for leaf in range(11)}
    assert fold(range(11), words, lambda left, right: f"({left}{right})") == "((((01)(23))((45)(67)))((89)10))"


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

    def weights():
        net, data = build("mlp")
        same = SameBits(net)
        for turn in range(2):
            same.backward(data[:8], models.loss_of(net))
        with torch.no_grad():
            net[0].weight[0, 0] += dist.get_rank()
        same.backward(data[:8], models.loss_of(net))  # looks at another tensor
        raises(RuntimeError, lambda: [same.backward(data[:8], models.loss_of(net)) for _ in net.state_dict()], "with different weights")
        same.load_state_dict(same.state_dict())
        raises(RuntimeError, lambda: same.backward(data[:8], models.loss_of(net)), "ranks began batch ")

    for case in (threads, model, seed, place, weights):
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

        net = models.mlp()
        net[0].weight.register_post_accumulate_grad_hook(print)
        raises(TypeError, lambda: SameBits(net).backward(models.vectors(8)[:], models.loss_of(net)), "hook")

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
    raises(ValueError, lambda: same.backward(next(iter(Loader(data, 8, 8))), loss_of), "cut in 8 shards, and SameBits has 4")
    raises(ValueError, lambda: same.load_state_dict(SameBits(model, shards=8).state_dict()), "saved with shards=8, and now it is 4")
    torch.set_num_threads(2)
    raises(RuntimeError, lambda: same.backward(data[:8], loss_of), "torch had 1 threads, and has 2")
    torch.set_num_threads(1)
    model.register_buffer("queue", torch.zeros(1, dtype=torch.long))

    def counts_samples(batch):
        model.queue += len(batch[0])
        return models.loss_of(model)(batch)

    raises(RuntimeError, lambda: same.backward(data[:5], counts_samples), "in the buffer queue")


def live_recovery_needs_a_launcher_and_parts_with_a_state():
    def case():
        model = models.mlp()
        same, loader = SameBits(model), Loader(models.vectors(29), 16)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        raises(TypeError, lambda: same.recover_live([]), "takes a paceline.torch.Loader, and this is a list")
        raises(TypeError, lambda: same.recover_live(loader, step=3), "step is a int, which has no state_dict")
        raises(TypeError, lambda: same.recover_live(loader, optimizer=optimizer), "what a lost rank has of its state is lost")
        with warnings.catch_warnings(record=True) as warned:
            same.recover_live(loader)
        assert len(warned) == (dist.get_rank() == 0) and all("no launcher recovers it live" in str(warning.message) for warning in warned)
        raises(ValueError, lambda: same.recover_live(*[loader] * dist.get_rank()), "ranks differ in parts of recover_live: rank 0 has []")
        return same.with_recovery(dist.get_world_size)

    assert ranks(2, case) == [2, 2]


if __name__ == "__main__":
    main(
        same_bits_on_any_number_of_ranks,
        same_bits_with_gloo_over_tcp_and_with_rings,
        sharded_optimizers_and_gradient_scalers_work,
        sums_follow_the_tree_of_the_rust_side,
        fewer_shards_than_ranks_are_refused,
        plain_ddp_gives_other_bits,
        a_run_goes_on_on_another_number_of_ranks,
        differences_between_ranks_are_named,
        models_in_parts_are_refused,
        one_shard_is_plain_torch,
        means_are_those_of_the_samples,
        types_of_numbers_other_than_float32,
        errors_leave_things_as_they_were,
        live_recovery_needs_a_launcher_and_parts_with_a_state,
    )
