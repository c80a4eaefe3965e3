"""A data-parallel job of PyTorch that a measurement kills: a network in DistributedDataParallel over Gloo, AdamW, one thread per rank,
random samples, and a checkpoint of rank 0 that every start reads.

Usage: torchrun --nproc-per-node N --max-restarts N recovery.py FOLDER small|large

`small` has about the parameters of Paceline's `--model small`; `large` has 8.4 million, 100 MB with the optimizer's. After each step rank 0
appends a line with `step` and `restart` to FOLDER/steps.jsonl. It runs until it is killed."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# Layers' widths, samples of a rank in a step, and steps between two checkpoints.
SIZES = {"small": ([64, 128, 128, 10], 16, 50), "large": ([2048, 2048, 2048, 10], 2, 10)}


def main():
    folder, size = Path(sys.argv[1]), sys.argv[2]
    widths, samples, save_every = SIZES[size]
    torch.set_num_threads(1)
    env = os.environ
    restart, rank, world = (int(env[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    # The agent's store still has the addresses of the start before.
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world, is_host)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"start {restart}", store), rank=rank, world_size=world)
    torch.manual_seed(7)
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with open(folder / "steps.jsonl", "a", encoding="utf-8") as steps:
        while True:
            loss = nn.functional.cross_entropy(model(torch.randn(samples, widths[0])), torch.randint(widths[-1], (samples,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank > 0:
                continue
            print(json.dumps({"step": step, "restart": restart}), file=steps, flush=True)
            if step % save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").rename(checkpoint)


main()
