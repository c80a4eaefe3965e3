"""Programs that know nothing of it are recorded in the run directory of `paceline run --run-dir`: each step, and what its operations took.

Usage: recorded.py [NAME...]: all cases, or those with a name in the list. Each case starts PACELINE_TEST_LAUNCHER with this file as its ranks.
`cargo test -p paceline-python` runs it if PACELINE_TEST_PYTHON is a Python with torch.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from forked import main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Loader, SameBits

HOW = "PACELINE_TEST_HOW"
STEPS, SAMPLES, RANKS = 6, 24, 2


def batches():
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES * STEPS // RANKS, 64), torch.randn(SAMPLES * STEPS // RANKS, 8))
    return torch.utils.data.DataLoader(data, SAMPLES // RANKS)


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    return model, torch.optim.SGD(model.parameters(), 1e-3)


def train(model, optimizer):
    for rows, targets in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), targets).backward()
        optimizer.step()


def ddp():
    model, optimizer = model_and_optimizer()
    model = DistributedDataParallel(model, bucket_cap_mb=0.5)
    train(model, optimizer)
    with torch.no_grad():
        for rows, _ in batches():
            model(rows)


def fsdp():
    model, _ = model_and_optimizer()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for part in (*model[::2], model):
        fully_shard(part, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), 1e-3))


def same_bits():
    model, optimizer = model_and_optimizer()
    same = SameBits(model, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES * STEPS, 64), torch.randn(SAMPLES * STEPS, 8))
    for batch in Loader(data, SAMPLES, 4):
        optimizer.zero_grad()
        same.backward(batch, lambda shard: nn.functional.mse_loss(model(shard[0]), shard[1]))
        optimizer.step()


def raising():
    ddp()
    if dist.get_rank() == 1:
        raise RuntimeError("the program is wrong")
    dist.barrier()


def job(how, folder, expected=0):
    """The lines of a job by their kinds."""
    command = [os.environ["PACELINE_TEST_LAUNCHER"], "run", "--nproc-per-node", str(RANKS), "--run-dir", folder, "--usage", "off"]
    result = subprocess.run([*command, __file__], env={**os.environ, HOW: how, "PYTHON_EXEC": sys.executable}, capture_output=True, text=True, timeout=120)
    assert result.returncode == expected, result
    with open(os.path.join(folder, "metrics.jsonl")) as lines:
        lines = [json.loads(line) for line in lines]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in ("start", "step", "spans", "end")}


def check(lines, first=1, ends=1):
    assert [line["step"] for line in lines["step"]][first - 1 :] == list(range(first, first + STEPS)), lines["step"]
    assert all(0 <= line["waited_seconds"] <= line["seconds"] for line in lines["step"])
    assert lines["start"][-1]["world"] == RANKS and len(lines["end"]) == ends, lines
    assert [line["step"] for line in lines["spans"]][first - 1 :] == list(range(first, first + STEPS))
    for line in lines["spans"]:
        for spans, buckets in zip(line["ranks"], line["buckets"], strict=True):
            assert len(buckets) > 0 and all(0 <= start <= ready <= end for _, start, ready, end in buckets), line
            assert {"data", "backward", "optimizer"} <= {kind for kind, *_ in spans}, line


def looked_at(folder):
    """What people see of it."""
    launcher = os.environ["PACELINE_TEST_LAUNCHER"]
    frame = subprocess.run([launcher, "watch", "--once", "--lang", "en", folder], capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
    subprocess.run([launcher, "report", "--lang", "en", folder], check=True, capture_output=True)
    with open(os.path.join(folder, "report.html")) as page:
        return frame.stdout, page.read()


def buckets_of_ddp_are_recorded_and_shown():
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, "run")
        lines = job("ddp", run)
        check(lines)
        parameters = sum(parameter.nbytes for parameter in model_and_optimizer()[0].parameters())
        for line in lines["spans"][2:]:  # DDP lays the buckets out anew in the second step
            for buckets in line["buckets"]:
                assert len(buckets) > 1 and sum(bytes for bytes, *_ in buckets) == parameters, line
        frame, page = looked_at(run)
        assert f"run  ended  step {STEPS}" in frame and "Between ranks" in frame, frame
        assert ", 1.2 MB, " in frame and ", 1.2 MB, " in page, frame
        # Another job in the same folder counts on.
        check(job("ddp", run), first=STEPS + 1, ends=2)


def gathers_and_scatters_of_fsdp_are_recorded_and_shown():
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, "run")
        lines = job("fsdp", run)
        check(lines)
        parts = [sum(parameter.nbytes for parameter in layer.parameters()) // RANKS for layer in model_and_optimizer()[0][::2]]
        for line in lines["spans"]:
            for spans, buckets in zip(line["ranks"], line["buckets"], strict=True):
                # Each layer's weights are gathered for both passes, and its gradients are scattered once.
                assert sorted(bytes for bytes, *_ in buckets) == sorted(parts * 3), line
                # FSDP waits for each of them at once.
                waits = [(start, end) for kind, start, end in spans if kind == "wait"]
                assert all(any(since <= start and end <= until for since, until in waits) for _, start, _, end in buckets), line
        frame, page = looked_at(run)
        words = "0 % of the communication hidden behind computing (operations: 9, 1.8 MB, "
        assert words in frame and words in page, frame


def operations_of_same_bits_are_recorded():
    with tempfile.TemporaryDirectory() as folder:
        lines = job("same_bits", folder)
        check(lines)
        assert all({"wait"} <= {kind for kind, *_ in spans} for line in lines["spans"] for spans in line["ranks"])


def a_run_that_fails_has_no_end_but_a_reason():
    with tempfile.TemporaryDirectory() as folder:
        lines = job("raising", folder, expected=1)
        assert [line["step"] for line in lines["step"]] == list(range(1, STEPS + 1)) and not lines["end"], lines
        frame, page = looked_at(folder)
        assert "failed" in frame and "the program is wrong" in page, frame


if __name__ == "__main__":
    if how := os.environ.get(HOW):
        dist.init_process_group("paceline")
        {"ddp": ddp, "fsdp": fsdp, "same_bits": same_bits, "raising": raising}[how]()
        sys.exit()
    main(
        buckets_of_ddp_are_recorded_and_shown,
        gathers_and_scatters_of_fsdp_are_recorded_and_shown,
        operations_of_same_bits_are_recorded,
        a_run_that_fails_has_no_end_but_a_reason,
    )
