"""Times a training step of PyTorch as examples/step_time does for Paceline: the same models, data shapes and optimizer.

Usage: peer_step.py [--workload NAME] [--steps N] [--warmup N] [--seconds N] [--precision f32|bf16] [--device cuda|cpu] [--compile]

A single process is plain PyTorch. With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, it is DistributedDataParallel over NCCL on
a GPU and over Gloo on the CPU. Rank 0 prints a JSON object per workload. PyTorch runs in eager mode, or with `--compile` as torch.compile
compiles the model; on a GPU f32 products run in TF32, as Burn's do; bf16 is autocast.
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


def convolution(inputs, outputs, stride, side=3):
    kernel = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Layers beside a shortcut."""

    def __init__(self, layers, shortcut):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = shortcut

    def forward(self, x):
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


def block(inputs, outputs):
    """Two convolutions."""
    stride = 1 if inputs == outputs else 2
    shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return Residual([convolution(inputs, outputs, stride), nn.ReLU(), convolution(outputs, outputs, 1)], shortcut)


def resnet20():
    layers, width = [convolution(3, 16, 1), nn.ReLU()], 16
    for stage in (16, 32, 64):
        for _ in range(3):
            layers.append(block(width, stage))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def bottleneck(inputs, inner, stride):
    """A 3x3 convolution between two of 1x1."""
    outputs = 4 * inner
    shortcut = nn.Identity() if inputs == outputs else convolution(inputs, outputs, stride, 1)
    narrow, middle = convolution(inputs, inner, 1, 1), convolution(inner, inner, stride)
    return Residual([narrow, nn.ReLU(), middle, nn.ReLU(), convolution(inner, outputs, 1, 1)], shortcut)


def resnet50():
    layers, width = [convolution(3, 64, 2, 7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for count, inner, first in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for at in range(count):
            layers.append(bottleneck(width, inner, 1 if at else first))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def transformer(width, heads, layers, epsilon, norm):
    layer = nn.TransformerEncoderLayer(
        width, nhead=heads, dim_feedforward=4 * width, dropout=0.0, activation="gelu", layer_norm_eps=epsilon, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=layers, norm=norm, enable_nested_tensor=False)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = transformer(WIDTH, 4, 4, 1e-5, nn.LayerNorm(WIDTH))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE))

    def forward(self, tokens):
        places = torch.arange(SEQUENCE, device=tokens.device)
        x = self.token(tokens) + self.position(places)
        x = self.blocks(x, mask=self.mask, is_causal=True)
        # Embedding and scores share one matrix.
        return (x @ self.token.weight.T).reshape(-1, VOCABULARY)


class Vit(nn.Module):
    """ViT-Tiny: 224 px in patches of 16."""

    def __init__(self):
        super().__init__()
        width, patches = 192, (224 // 16) ** 2
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + patches, width))
        self.blocks = transformer(width, 3, 12, 1e-6, None)
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        # The head reads nothing but the class.
        return self.head(self.norm(self.blocks(x)[:, 0]))


def images(batch, side):
    return torch.rand(batch, 3, side, side), torch.arange(batch) % 10


def text(batch):
    tokens = torch.arange(batch * SEQUENCE + 1) % 500
    return tokens[:-1].reshape(batch, SEQUENCE), tokens[1:]


# Name: the model, and a batch of samples and classes.
WORKLOADS = {
    "mlp": (mlp, lambda: (torch.randn(128, 784), torch.arange(128) % 10)),
    "resnet20": (resnet20, lambda: images(64, 32)),
    "gpt": (Gpt, lambda: text(8)),
    "resnet50": (resnet50, lambda: images(4, 224)),
    "vit": (Vit, lambda: images(8, 224)),
}
# As in step_time, the small ones run if no workload is named.
SMALL = ["mlp", "resnet20", "gpt"]


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


def measure(name, place, args):
    steps, warmup, limit, precision = args.steps, args.warmup, args.seconds, args.precision
    build, samples = WORKLOADS[name]
    torch.manual_seed(0)
    model = build().to(place.device)
    parameters = sum(p.numel() for p in model.parameters())
    model = DistributedDataParallel(model, gradient_as_bucket_view=True) if place.world > 1 else model
    model = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
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
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for _ in range(steps):
        step()
    place.finish()
    streamed = (time.perf_counter() - start) / steps
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    if place.rank == 0:
        line = {
            "peer": place.peer() + ("-compiled" if args.compile else ""),
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
            "page_faults": faults / steps,
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
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    elif not torch.cuda.is_available():
        raise SystemExit("peer_step.py: PyTorch sees no GPU here")
    place = Place(args.device)
    for name in [args.workload] if args.workload else SMALL:
        measure(name, place, args)
    if place.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
