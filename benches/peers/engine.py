"""The job that benches/engines.py starts by several engines: joins, adds a number, trains a small perceptron with DDP over Gloo, and ends.

Usage: engine.py OUT, as one rank. Rank 0 writes {"joined": time, "step_seconds": median, "ended": time} to OUT; times are time.time().
"""

import json
import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def train(out):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.all_reduce(torch.ones(1))
    joined = time.time()
    sizes = [784, 256, 256, 10]
    layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(64, 784), torch.randint(10, (64,))
    steps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        steps.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        record = {"joined": joined, "step_seconds": median(steps[STEPS // 6 :]), "ended": time.time()}
        with open(f"{out}.new", "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(f"{out}.new", out)


if __name__ == "__main__":
    train(sys.argv[1])
    dist.destroy_process_group()
