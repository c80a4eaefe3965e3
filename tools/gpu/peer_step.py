"""Times a training step of PyTorch as examples/step_time does for Paceline: the same three models, data shapes and optimizer.

Usage: peer_step.py [--workload NAME] [--steps N] [--warmup N] [--seconds N] [--precision f32|bf16] [--device cuda|cpu]

A single process is plain PyTorch. With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, it is DistributedDataParallel over NCCL on
a GPU and over Gloo on the CPU. Rank 0 prints a JSON object per workload. PyTorch runs in eager mode; on a GPU f32 products run in TF32,
as Burn's do; bf16 is autocast.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEQUENCE = 128
VOCABULARY = 512
WIDTH = 256


def mlp():
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


def convolution(inputs, outputs, stride):
    kernel = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs, outputs):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = convolution(inputs, outputs, stride)
        self.second = convolution(outputs, outputs, 1)
        same = inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.second(nn.functional.relu(self.first(x)))
        return nn.functional.relu(y + self.shortcut(x))


def resnet20():
    layers, width = [convolution(3, 16, 1), nn.ReLU()], 16
    for stage in (16, 32, 64):
        for _ in range(3):
            layers.append(Block(width, stage))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers=4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE))

    def forward(self, tokens):
        places = torch.arange(SEQUENCE, device=tokens.device)
        x = self.token(tokens) + self.position(places)
        x = self.blocks(x, mask=self.mask, is_causal=True)
        # Embedding and scores share one matrix.
        return (x @ self.token.weight.T).reshape(-1, VOCABULARY)


def text(batch):
    tokens = torch.arange(batch * SEQUENCE + 1) % 500
    return tokens[:-1].reshape(batch, SEQUENCE), tokens[1:]


# Name: the model, and a batch of samples and classes.
WORKLOADS = {
    "mlp": (mlp, lambda: (torch.randn(128, 784), torch.arange(128) % 10)),
    "resnet20": (resnet20, lambda: (torch.rand(64, 3, 32, 32), torch.arange(64) % 10)),
    "gpt": (Gpt, lambda: text(8)),
}


class Place:
    """This rank's device and its process group."""

    def __init__(self, device):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.on_gpu = device == "cuda"
        # Ranks share a GPU if there are fewer GPUs than ranks.
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count() if self.on_gpu else 0
        self.device = torch.device(device, index) if self.on_gpu else torch.device(device)
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            # Convolutions run in TF32 anyway.
            torch.set_float32_matmul_precision("high")
        if self.world > 1:
            dist.init_process_group("nccl" if self.on_gpu else "gloo")

    def peer(self):
        if self.world == 1:
            return "torch"
        return "torch-ddp-nccl" if self.on_gpu else "torch-ddp-gloo"

    def meet(self):
        if self.world > 1:
            dist.barrier()
        self.finish()

    def finish(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def slowest(self, seconds):
        longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


def fitting(steps, warmup, step, limit):
    """Steps to time and to warm up with, if one takes `step` seconds and all may take `limit`; same rule as step_time."""
    share = min(limit / (step * (warmup + 2 * steps)), 1)
    return max(int(steps * share), min(3, steps)), max(int(warmup * share), min(3, warmup))


def measure(name, place, steps, warmup, limit, precision):
    build, samples = WORKLOADS[name]
    torch.manual_seed(0)
    model = build().to(place.device)
    parameters = sum(p.numel() for p in model.parameters())
    model = DistributedDataParallel(model) if place.world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    inputs, classes = (part.to(place.device) for part in samples())
    autocast = torch.autocast(place.device.type, torch.bfloat16, enabled=precision == "bf16")

    def step():
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()

    seconds, number = [], 0
    while number < warmup + steps:
        place.meet()
        start = time.perf_counter()
        step()
        place.finish()
        took = time.perf_counter() - start
        if number >= warmup:
            seconds.append(took)
        if number == 2 and limit:
            steps, warmup = fitting(steps, warmup, place.slowest(took), limit)
        number += 1
    place.meet()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    place.finish()
    streamed = (time.perf_counter() - start) / steps
    if place.rank == 0:
        line = {
            "peer": place.peer(),
            "version": torch.__version__,
            "workload": name,
            "world": place.world,
            "device": place.device.type,
            "precision": precision,
            "batch": len(inputs),
            "parameters": parameters,
            "steps": steps,
            "step_seconds": statistics.median(seconds),
            "min_seconds": min(seconds),
            "max_seconds": max(seconds),
            "streamed_seconds": streamed,
            "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description="Time a training step of PyTorch.")
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seconds", type=int, help="approximate time limit of a workload; slow steps are reduced in number")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    elif not torch.cuda.is_available():
        raise SystemExit("peer_step.py: PyTorch sees no GPU here")
    place = Place(args.device)
    for name in [args.workload] if args.workload else WORKLOADS:
        measure(name, place, args.steps, args.warmup, args.seconds, args.precision)
    if place.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
