"""PyTorch's Gloo all-reduce, measured as `paceline bench` measures its own: float32 sums, in place.

Usage: torchrun --nproc-per-node N gloo.py SECONDS BYTES...

Rank 0 prints one JSON object for each size. Every rank times its own call after a barrier, and the slowest rank's time
of each iteration counts. Sizes are measured for about SECONDS each. Results are compared with exact sums before and
after.
"""

import json
import math
import sys
import time

import torch
import torch.distributed as dist

WARMUP = 5
ITERATIONS_MIN = 5
ITERATIONS_MAX = 1_000_000


def inputs(rank, elements):
    """Small whole numbers: their sums are exact in any order."""
    return torch.remainder(torch.arange(elements) * 3 + rank * 5 + 1, 16).to(torch.float32)


def wrong_elements(rank, world, elements):
    """Elements that differ from the exact sum, over all ranks."""
    data = inputs(rank, elements)
    dist.all_reduce(data)
    expected = sum(inputs(one, elements) for one in range(world))
    wrong = torch.count_nonzero(data != expected).reshape(1)
    dist.all_reduce(wrong)
    return int(wrong)


def timed(data):
    dist.barrier()
    began = time.perf_counter_ns()
    dist.all_reduce(data)
    return time.perf_counter_ns() - began


def slowest(nanos):
    times = torch.tensor(nanos, dtype=torch.int64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return sorted(times.tolist())


def quantile(ascending, share):
    return ascending[max(1, math.ceil(share * len(ascending))) - 1]


def measure(rank, world, size, seconds):
    elements = max(1, size // 4)
    wrong = wrong_elements(rank, world, elements)
    data = torch.zeros(elements)
    walls = []
    for _ in range(WARMUP):
        began = time.perf_counter_ns()
        timed(data)
        walls.append(time.perf_counter_ns() - began)
    typical = slowest([quantile(sorted(walls), 0.5)])[0]
    iterations = int(seconds * 1e9) // max(typical, 1)
    iterations = min(max(iterations, ITERATIONS_MIN), ITERATIONS_MAX)
    nanos = slowest([timed(data) for _ in range(iterations)])
    wrong += wrong_elements(rank, world, elements)
    p50_us = quantile(nanos, 0.5) / 1e3
    algbw = elements * 4 / p50_us / 1e3
    return {
        "record": "timing",
        "library": "gloo",
        "version": torch.__version__,
        "operation": "all-reduce",
        "transport": "tcp",
        "world": world,
        "memory": None,
        "bytes": elements * 4,
        "elements": elements,
        "dtype": "f32",
        "reduction": "sum",
        "iterations": iterations,
        "min_us": nanos[0] / 1e3,
        "p50_us": p50_us,
        "p99_us": quantile(nanos, 0.99) / 1e3,
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * 2 * (world - 1) / world,
        "wrong": wrong,
    }


def main():
    seconds, sizes = float(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in sizes:
        row = measure(rank, world, size, seconds)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


main()
