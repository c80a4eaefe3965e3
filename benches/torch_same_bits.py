#!/usr/bin/env python3
"""Shows that SameBits ends with one hash on any number of ranks where DistributedDataParallel does not, and what it costs.

Usage: benches/torch_same_bits.py [--quick] [--rounds N] [--worlds LIST] [--only REGEX] [--python PYTHON] [--library FILE] [--table]

Appends to docs/benchmarks/torch_same_bits.jsonl and prints both tables. PYTHON is one that has PyTorch; the package is the one in this checkout,
with the library FILE (target/release/libpaceline_python.so). Every rank has one compute thread, and all have the backend `paceline`. First each model is trained for
some steps on 1, 2, 3, 4 and 8 ranks. Then the ways of averaging take turns in the same processes, step by step, on 1 and 2 ranks, and
the medians with quartiles of a step at one global batch are shown. --quick trains tiny models for a moment. `--table` prints the tables of the newest run again.
Build first: `cargo build --release -p paceline-python`. CARGO_TARGET_DIR is heeded.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

from results import ROOT, cell, newest, path
from torch_backend import arguments, measurements, package

OUT = path("torch_same_bits.jsonl")
BATCH = 48  # which every number of ranks divides
STEPS = 4
WAYS = ("plain DDP", "SameBits, a shard for each rank", "plain DDP, 8 micro-batches", "SameBits, 8 shards")


def measure(options):
    """Runs ranks, and prints a JSON line for each result."""
    sys.path.insert(0, str(ROOT / "python/tests"))
    import models
    import torch
    import torch.distributed as dist
    from forked import ranks
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Loader, SameBits, weights_hash

    torch.set_num_threads(1)
    small = options.quick
    builds = {
        "mlp": (lambda: models.mlp(64 if small else 1024), models.vectors(BATCH * STEPS)),
        "resnet20 with batch norm": (lambda: models.resnet20(4 if small else 16), models.images(BATCH * STEPS, 8 if small else 32)),
        "gpt with dropout": (
            lambda: models.GPT(width=32 if small else 128, length=16 if small else 64, layers=2 if small else 4),
            models.texts(BATCH * STEPS, 16 if small else 64),
        ),
    }
    builds = {name: build for name, build in builds.items() if re.search(options.only, name)}

    def here():
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def stepper(way, name):
        """A model, and a function that trains it with the next batch."""
        rank, world = here()
        build, data = builds[name]
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if way in (WAYS[0], WAYS[2]):
            wrapped = DistributedDataParallel(model) if world > 1 else model
            sampler = torch.utils.data.DistributedSampler(data, world, rank)
            batches = torch.utils.data.DataLoader(data, BATCH // world, sampler=sampler)
            parts = 1 if way == WAYS[0] else 8 // world

            def backward(batch):
                for part in range(parts):
                    is_last = part + 1 == parts
                    with nullcontext() if is_last or world == 1 else wrapped.no_sync():
                        (models.loss_of(wrapped)([rows[part::parts] for rows in batch]) / parts).backward()
        else:
            shards = world if way == WAYS[1] else 8
            same, batches = SameBits(model, shards), Loader(data, BATCH, shards)

            def backward(batch):
                same.backward(batch, models.loss_of(model))

        batches = [*batches]

        def step(turn):
            optimizer.zero_grad()
            backward(batches[turn % len(batches)])
            optimizer.step()

        return model, step

    def final_hash(way, name):
        model, step = stepper(way, name)
        for turn in range(STEPS):
            step(turn)
        return weights_hash(model)

    def prices(name):
        steps = {way: stepper(way, name)[1] for way in WAYS}
        taken = {way: [] for way in WAYS}
        for turn in range(options.rounds + 2):
            for way in WAYS[:: 1 if turn % 2 else -1]:
                if dist.is_initialized():
                    dist.barrier()
                begun = time.perf_counter()
                steps[way](turn)
                if dist.is_initialized():
                    dist.barrier()
                if turn >= 2:
                    taken[way].append(time.perf_counter() - begun)
        return taken

    def say(**line):
        print(json.dumps(line), flush=True)

    for name in builds:
        for world in map(int, options.worlds.split(",")):
            for way in (WAYS[0], WAYS[3]):
                hashes = set(ranks(world, final_hash, way, name, limit_s=900))
                if way != WAYS[0] and len(hashes) > 1:
                    sys.exit(f"{name} on {world} ranks: the ranks end with different weights")
                say(record="hash", model=name, ranks=world, way=way, hashes=sorted(hashes))
    for name in builds:
        for world in (1, 2):
            for way, taken in ranks(world, prices, name, limit_s=900)[0].items():
                for seconds in taken:
                    say(record="time", model=name, ranks=world, way=way, seconds=seconds)


def tables(lines):
    print(f"\n{lines[0]['machine']}, load {lines[0]['load']:.1f} to {lines[-1]['load']:.1f}, commit {lines[0]['commit']}\n")
    found = {}
    for line in lines:
        if line["record"] == "hash":
            # Batch norm's statistics differ between DDP's ranks.
            short = " ".join(hash[:8] for hash in line["hashes"][:1]) + " ..." * (len(line["hashes"]) > 1)
            found.setdefault((line["model"], line["way"]), {})[line["ranks"]] = short
    worlds = sorted({world for by_world in found.values() for world in by_world})
    print("| model | way | " + " | ".join(f"{world} ranks" if world > 1 else "1 rank" for world in worlds) + " |")
    print("|---|---|" + "---|" * len(worlds))
    for (model, way), by_world in found.items():
        print(f"| {model} | {way} | " + " | ".join(f"`{by_world[world]}`" for world in worlds) + " |")
    times = {}
    for line in lines:
        if line["record"] == "time":
            times.setdefault((line["model"], line["ranks"]), {}).setdefault(line["way"], []).append(line["seconds"] * 1e3)
    print(f"\nms of a step of {BATCH} samples: median (quartiles)\n")
    print("| model | ranks | " + " | ".join(WAYS) + " | the last by the first |")
    print("|---|---|" + "---|" * len(WAYS) + "---|")
    for (model, world), by_way in times.items():
        ratio = median(by_way[WAYS[3]]) / median(by_way[WAYS[0]])
        print(f"| {model} | {world} | " + " | ".join(cell(by_way[way], ",.1f") for way in WAYS) + f" | {ratio:.2f} |")


def main():
    parser = arguments(__doc__, OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--worlds", default="1,2,3,4,8")
    parser.add_argument("--only", default="")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 11)
    if options.measure:
        return measure(options)
    if options.table:
        return tables(newest(options.out, options.table))
    lines = measurements(options)
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder), options.library.resolve())
        env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'benches'}", "OMP_NUM_THREADS": "1"}
        command = [options.python, __file__, "--measure", "--rounds", str(options.rounds), "--worlds", options.worlds, "--only", options.only]
        with subprocess.Popen([*command, *["--quick"] * options.quick], env=env, stdout=subprocess.PIPE, text=True) as ranks:
            for line in ranks.stdout:
                lines.add(**json.loads(line))
    if ranks.returncode:
        sys.exit("the ranks failed")
    tables(lines.end())


if __name__ == "__main__":
    main()
