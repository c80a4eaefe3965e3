"""A training step of PyTorch DDP over Gloo: the perceptron 784-1024-1024-10, AdamW, a batch of 128 per rank, one thread.

Usage: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, ddp.py together|apart OUT

`together` averages gradients over all ranks, `apart` trains each rank alone. Rank 0 writes {"step_seconds": median} to OUT.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARMUP = 34
STEPS = 200


def main():
    together = sys.argv[1] == "together"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if together:
        dist.init_process_group("gloo")
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    model = nn.Sequential(*layers)
    model = DistributedDataParallel(model) if together else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    inputs, labels = torch.randn(128, 784), torch.arange(128) % 10
    seconds = []
    for step in range(WARMUP + STEPS):
        if together:
            dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step >= WARMUP:
            seconds.append(time.perf_counter() - start)
    if os.environ["RANK"] == "0":
        with open(sys.argv[2], "w") as out:
            json.dump({"step_seconds": statistics.median(seconds)}, out)
    if together:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
