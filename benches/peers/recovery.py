"""A data-parallel job of PyTorch that a measurement kills: a network, AdamW, one thread per rank, random samples. Alone it is DistributedDataParallel over
Gloo, with a checkpoint of rank 0 that every start reads; with `same-bits` it is SameBits, which recovers live.

Usage: torchrun --nproc-per-node 4 --max-restarts N recovery.py FOLDER small|large
       paceline run --nproc-per-node 4 --recovery live --max-restarts N recovery.py FOLDER small|large same-bits

`small` has about the parameters of Paceline's `--model small`; `large` has 8.4 million, 100 MB with the optimizer's. After each step rank 0
appends a line to FOLDER/metrics.jsonl: with `step` and `restart`, or `step`, `seconds` and `generation`, and a line where a generation begins.
It runs until it is killed."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# Layers' widths, samples of a rank in a step, and steps between two checkpoints.
SIZES = {"small": ([64, 128, 128, 10], 16, 50), "large": ([2048, 2048, 2048, 10], 2, 10)}


def network(widths):
    torch.manual_seed(7)
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def restarted(folder, widths, samples, save_every):
    env = os.environ
    restart, rank, world = (int(env[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    # The agent's store still has the addresses of the start before.
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world, is_host)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"start {restart}", store), rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(network(widths), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as steps:
        while True:
            loss = nn.functional.cross_entropy(model(torch.randn(samples, widths[0])), torch.randint(widths[-1], (samples,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank > 0:
                continue
            print(json.dumps({"kind": "step", "step": step, "restart": restart}), file=steps, flush=True)
            if step % save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").rename(checkpoint)


def recovered(folder, widths, samples):
    """The global batch is that of four ranks. What rank 0 counts is right as long as it is none that replaces another one."""
    from paceline.torch import Loader, SameBits

    dist.init_process_group("paceline", timeout=timedelta(seconds=60))
    model = network(widths)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = torch.utils.data.TensorDataset(torch.randn(64 * samples, widths[0]), torch.randint(widths[-1], (64 * samples,)))
    same, loader = SameBits(model, shards=8), Loader(rows, batch_size=4 * samples, shards=8)
    same.recover_live(loader, optimizer=optimizer)
    step, generation, world, last = 0, 0, None, time.perf_counter()
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as steps:

        def tell(**line):
            if dist.get_rank() == 0:
                print(json.dumps(line), file=steps, flush=True)

        while True:
            for batch in loader:
                optimizer.zero_grad()
                same.backward(batch, lambda shard: nn.functional.cross_entropy(model(shard[0]), shard[1]))
                optimizer.step()
                now = time.perf_counter()
                if dist.get_world_size() != world:
                    generation += world is not None
                    world = dist.get_world_size()
                    tell(kind="begin", world=world)
                step += 1
                tell(kind="step", step=step, seconds=now - last, generation=generation)
                last = now


def main():
    folder, (widths, samples, save_every) = Path(sys.argv[1]), SIZES[sys.argv[2]]
    torch.set_num_threads(1)
    if sys.argv[3:] == ["same-bits"]:
        recovered(folder, widths, samples)
    else:
        restarted(folder, widths, samples, save_every)


main()
