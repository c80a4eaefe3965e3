"""Ranks of SameBits are killed in jobs with `--recovery live`: the others go on, replacements join, and the bits are those of an undisturbed run.

Usage: live.py [NAME...]: all cases, or those with a name in the list. Each case starts PACELINE_TEST_LAUNCHER with this file as its ranks.
`cargo test -p paceline-python` runs it if PACELINE_TEST_PYTHON is a Python with torch.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from forked import free_port, main, raises, ranks
from torch import nn

from paceline import _library as library
from paceline.torch import Loader, SameBits, weights_hash
from paceline.torch.group import Group
from paceline.torch.live import Live

# Has words such as `2@5:forward` (rank 2 in step 5) and `+1@joined:now` (the first replacement, once it has joined).
FAULTS = "PACELINE_TEST_FAULTS"
EPOCHS = 4


class Data(torch.utils.data.Dataset):
    """Vectors with noise from torch's generator, as augmentations have."""

    def __len__(self):
        return 70

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        row = torch.randn(8, generator=generator)
        return row + 0.1 * torch.randn(8), row[:4].argmax()


def words():
    return os.environ.get(FAULTS, "").split()


def model_and_parts(workers=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    return model, optimizer, schedule, Loader(Data(), 24, num_workers=workers, persistent_workers=workers > 0)


def trained(how, on):
    return train_on_whole_batches(on) if "whole" in how else train(on, 2 if "accumulate" in how else 1)


def train(on, accumulate):
    """Trains, and gives the hash of the weights and the scores of all epochs."""
    model, optimizer, schedule, loader = model_and_parts(int("workers" in words()))
    is_other = "other" in words() and "PACELINE_REPLACEMENT" in os.environ
    same, scores = SameBits(model, seed=3 + is_other), Scores()
    if "groups" in words():
        dist.new_group([0, 1])
    if dist.is_initialized() and "plain" not in words():
        same.recover_live(loader, optimizer=optimizer, schedule=schedule, scores=scores)
    if "later" in words():
        raises(RuntimeError, lambda: dist.new_group([0, 1]), "make no others after SameBits.recover_live")

    def loss_of(shard):
        on("forward", step)
        return nn.functional.cross_entropy(model(shard[0]), shard[1])

    def score():
        """Each rank's part of the data."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        rows = torch.arange(64).view(8, 8)[rank::world] / 64
        model.eval()
        total = (model(rows).detach() * 2**20).round().sum().view(1).double()
        model.train()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item()

    while loader.epoch < EPOCHS:
        for batch in loader:
            step = same.state_dict()["batches"]
            on("loaded", step)
            same.backward(batch, loss_of)
            on("committed", step)
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            on("stepped", step)
        scores.all.append(same.with_recovery(score))
    return weights_hash(model)[:16], scores.all


def train_on_whole_batches(on):
    """The same without a loader."""
    model, optimizer, _, _ = model_and_parts()
    same, rows = SameBits(model), torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    if dist.is_initialized():
        same.recover_live(optimizer=optimizer)
    for step in range(8):
        on("loaded", step)
        optimizer.zero_grad()
        same.backward(rows + step, lambda shard: model(shard).logsumexp(1).mean())
        optimizer.step()
    return weights_hash(model)[:16], []


class Scores:
    """State of the program's own."""

    def __init__(self):
        self.all = []

    def state_dict(self):
        return {"all": self.all}

    def load_state_dict(self, state):
        self.all = state["all"]


def rank():
    """The part of a rank."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=6) if ":stopped" in os.environ[FAULTS] else None
    dist.init_process_group("paceline", timeout=limit)
    replacement = os.environ.get("PACELINE_REPLACEMENT")
    own = f"+{replacement}" if replacement else os.environ["RANK"]
    faults = [word for word in words() if word.startswith(f"{own}@")]
    now = {"step": -1, "operations": 0}

    def strike(place):
        if f"{own}@{place}" in faults:
            os.kill(os.getpid(), signal.SIGSTOP if place.endswith(":stopped") else signal.SIGKILL)

    def on(place, step):
        if place == "loaded":
            if replacement and now["step"] < 0:
                print(f"joined before step {step}", flush=True)
                strike("joined:now")
            now["step"], now["operations"] = step, 0
            strike(f"{step}:stopped")
        strike(f"{step}:{place}")

    def start(self, calls, *args):
        """Operations of a step: `op2` is the third, and `in2` is killed right after it was begun."""
        place = f"{now['step']}:"
        number = now["operations"]
        now["operations"] += 1
        strike(f"{place}op{number}")
        if f"{own}@{place}in{number}" in faults:
            library.submit(self._handle, calls[0], library.ctypes.c_uint64())
            strike(f"{place}in{number}")
        return real_start(self, calls, *args)

    def meet(live):
        """With `waits`, ranks wait for the replacements of those that are lost, with `once` only in step 3; with `lacks`, the result does not reach
        this rank, which sees the loss first."""
        waits = "waits" in words() or ("once" in words() and now["step"] == 3)
        while waits and dist.get_world_size() < int(os.environ["WORLD_SIZE"]) and live._group.outlook() == library.IN_ORDER:
            time.sleep(0.001)
        real_meet(live)
        if f"{own}@{now['step']}:lacks" in faults:
            faults.clear()
            while live._group.outlook() != library.LOST:
                time.sleep(0.001)
            print("lacks a result", flush=True)
            live.look()

    def settle(self, place, completed):
        strike(f"{now['step']}:forming")
        settled = real_settle(self, place, completed)
        if place == library.WITHIN and settled["completed"] > completed:
            print("completes what another rank has completed", flush=True)
        return settled

    real_start, Group._start = Group._start, start
    real_meet, Live._meet = Live._meet, meet
    real_settle, Group.settle = Group.settle, settle
    outcome = trained(words(), on)
    print(f"ended as rank {dist.get_rank()} of {dist.get_world_size()} with {outcome}", flush=True)
    dist.destroy_process_group()


def job(ranks, faults, *options, transport="shm", code=0, nodes=1):
    """Runs a job with so many ranks on each node, and gives its output and its errors."""
    command = [os.environ["PACELINE_TEST_LAUNCHER"], "run", "--nproc-per-node", str(ranks), "--recovery", "live", "--no-fold", *options]
    variables = {**os.environ, FAULTS: faults, "PACELINE_TRANSPORT": transport, "OMP_NUM_THREADS": "1"}
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        variables |= {"PACELINE_JOB_TOKEN": "5e" * 32}
    launchers = [
        subprocess.Popen(
            [*command, sys.executable, __file__],
            env={**variables, "PACELINE_HOST_ID": f"host {node}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]
    said = [launcher.communicate(timeout=300) for launcher in launchers]
    assert all(launcher.returncode == code for launcher in launchers), (faults, code, [launcher.returncode for launcher in launchers], said)
    return tuple("".join(parts) for parts in zip(*said))


@functools.cache
def expected(accumulates, whole):
    return trained(["accumulate"] * accumulates + ["whole"] * whole, lambda place, step: None)


def goes_on(ranks, faults, left, *options, **more):
    """Runs a job after which so many ranks are left, and compares their results with those of an undisturbed rank."""
    out, err = job(ranks, faults, *options, **more)
    ends = re.findall(r"ended as rank \d+ of (\d+) with (.*)", out)
    assert len(ends) == left and {int(world) for world, _ in ends} == {left}, (faults, out, err)
    undisturbed = expected("accumulate" in faults, "whole" in faults)
    assert {outcome for _, outcome in ends} == {str(undisturbed)}, (faults, ends, undisturbed)
    return out, err


# The operations of a step on three ranks are what the shards tell (0), statistics (1 to 3), gradients (4, 5) and the meeting (6). On two and four
# our all-reduce adds along the tree of the shards: statistics (1, 2), gradients (3), the meeting (4). An evaluation has two more.


def a_rank_that_is_killed_anywhere_in_a_step_costs_no_bits():
    for faults in (
        "3@1:forward 0@4:op4 1@7:committed",
        "3@1:op0 2@1:forming 0@8:op0",
        "0@1:in3 2@4:op5 3@8:stepped",
        "3@1:op4 2@4:in6 1@8:in4",
    ):
        _, err = goes_on(4, faults, 1)
        for left in ("3 ranks go", "2 ranks go", "1 rank goes"):
            assert re.search(rf"rank \d \(pid \d+\) was killed by signal 9 .*; {left} on", err), (faults, err)


def so_it_is_over_tcp_and_with_workers_of_loaders():
    goes_on(4, "0@2:in1 3@2:committed 2@7:in4 workers", 1, transport="tcp")


def a_rank_that_is_stopped_is_given_up_after_the_timeout_of_the_group():
    _, err = goes_on(3, "1@4:stopped", 2)
    assert re.search(r"rank 1 \(pid \d+\) stalled after .*; 2 ranks go on", err), err


def so_it_is_with_whole_batches():
    goes_on(3, "1@3:op5 0@5:in3 whole", 1)


def so_it_is_on_two_nodes():
    goes_on(2, "1@2:op4 2@6:forward waits", 4, "--max-restarts", "9", transport="auto", nodes=2)


def a_rank_that_is_behind_completes_the_step_with_what_it_has():
    out, _ = goes_on(3, "1@4:lacks 0@4:committed", 2)
    assert "lacks a result" in out and "completes what another rank has completed" in out, out


def a_rank_may_be_lost_in_an_evaluation():
    goes_on(3, "1@2:op7 2@5:in5", 1)


def a_program_that_does_not_ask_for_it_ends_with_the_named_failure():
    _, err = job(3, "1@4:op3 plain", code=128 + signal.SIGKILL)
    assert "no live recovery: rank " in err and re.search(r"error: rank 1 \(pid \d+\) was killed by signal 9", err), err


def what_cannot_recover_is_refused():
    _, err = job(2, "groups", code=1)
    assert "live recovery needs the group of all ranks to be the only one" in err, err
    goes_on(2, "1@2:op0 later", 1)


def a_replacement_with_other_settings_is_refused():
    _, err = goes_on(2, "1@2:op0 other once", 1, "--max-restarts", "1")
    assert "ranks differ in seed: rank 0 has 3, rank 1 has 4" in err, err


def a_state_that_no_memory_holds_is_refused():
    def take():
        live = Live(dist.group.WORLD, {}, None, None, None)
        for size in (1 << 60, -1):
            if dist.get_rank() == 0:
                dist.send(torch.tensor([size, 0]), 1)
            else:
                raises(RuntimeError, lambda: live._receive(0), f"rank 0 sends a state of {size} bytes")

    ranks(2, take)


def replacements_go_on_with_the_state_of_the_others():
    out, err = goes_on(3, "0@1:in4 1@3:forward +1@joined:now waits", 3, "--max-restarts", "9")
    assert out.count("joined before step") == 3, (out, err)
    assert err.count("joins as a replacement; 3 ranks go on") >= 2, err
    goes_on(2, "1@0:forward 0@6:op2 workers accumulate waits", 2, "--max-restarts", "9", transport="tcp")


if __name__ == "__main__":
    if FAULTS in os.environ:
        rank()
    else:
        main(
            a_rank_that_is_killed_anywhere_in_a_step_costs_no_bits,
            so_it_is_over_tcp_and_with_workers_of_loaders,
            so_it_is_with_whole_batches,
            so_it_is_on_two_nodes,
            a_rank_that_is_stopped_is_given_up_after_the_timeout_of_the_group,
            a_rank_that_is_behind_completes_the_step_with_what_it_has,
            a_rank_may_be_lost_in_an_evaluation,
            a_state_that_no_memory_holds_is_refused,
            replacements_go_on_with_the_state_of_the_others,
            a_replacement_with_other_settings_is_refused,
            what_cannot_recover_is_refused,
            a_program_that_does_not_ask_for_it_ends_with_the_named_failure,
        )
