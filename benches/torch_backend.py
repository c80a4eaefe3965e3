#!/usr/bin/env python3
"""Times operations of torch.distributed and training steps with Gloo and with the backend `paceline`, in alternating rounds.

Usage: benches/torch_backend.py [--rounds N] [--ranks LIST] [--only REGEX] [--python PYTHON] [--library FILE] [--table]

Appends to docs/benchmarks/torch_backend.jsonl and prints a table of medians with quartiles. PYTHON is one that has PyTorch; the package is the one
in this checkout, with the library FILE (target/release/libpaceline_python.so). A round runs each backend in processes of its own, which time all
rows. All ranks have one compute thread. `--table` prints the table of the newest run again.
Build first: `cargo build --release -p paceline-python`. CARGO_TARGET_DIR is heeded.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import ROOT, Results, cell, newest, path

OUT = path("torch_backend.jsonl")
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BACKENDS = ("gloo", "paceline")
SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


def name(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def measure(backend, rank, world, port, only):
    """One rank: prints the median seconds of each row, on rank 0."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))

    def row(label, call, seconds=0.3):
        if not re.search(only, label):
            return
        for _ in range(3):
            call()
        begun = time.perf_counter()
        call()
        # All ranks make the same number of calls.
        calls = torch.tensor([max(5, min(2000, int(seconds / (time.perf_counter() - begun))))])
        dist.broadcast(calls, 0)
        taken = []
        for _ in range(calls.item()):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        if rank == 0:
            print(json.dumps({"row": label, "seconds": median(taken)}), flush=True)

    for size in SIZES:
        tensor = torch.zeros(max(1, size // 4))
        row(f"all_reduce {name(size)}", lambda t=tensor: dist.all_reduce(t))
    for size in (8, 1 << 20):
        tensor, whole = torch.zeros(size // 4), torch.zeros(world * size // 4)
        row(f"broadcast {name(size)}", lambda t=tensor: dist.broadcast(t, 0))
        row(f"all_gather_into_tensor {name(size)}", lambda t=tensor, w=whole: dist.all_gather_into_tensor(w, t))
        row(f"reduce_scatter_tensor {name(size)}", lambda t=tensor, w=whole: dist.reduce_scatter_tensor(t, w))

        def ping(t=tensor):
            if rank == 0:
                dist.send(t, 1)
                dist.recv(t, 1)
            elif rank == 1:
                dist.recv(t, 0)
                dist.send(t, 0)

        row(f"send and recv {name(size)}", ping)
    row("barrier", dist.barrier)
    row("new_group and first all_reduce", lambda: dist.all_reduce(torch.zeros(1), group=dist.new_group()), 0.5)

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), *(part for _ in range(3) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU()))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    inputs, targets = torch.randn(64, 512), torch.randint(0, 10, (64,))

    def step(model):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()

    row("mlp step alone", lambda: step(model), 1.0)
    ddp = DistributedDataParallel(model)
    row("mlp step with DDP", lambda: step(ddp), 2.0)
    dist.barrier()
    dist.destroy_process_group()


def arguments(doc, out):
    """What all scripts that run the package of this checkout with some PyTorch can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("PACELINE_BENCH_PYTHON", sys.executable))
    parser.add_argument("--library", type=Path, default=TARGET / "release/libpaceline_python.so")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--table", nargs="?", type=int, const=1, metavar="RUNS")
    return parser


def measurements(options):
    """Where measurements go. The library must be there."""
    if not options.library.is_file():
        sys.exit(f"there is no library {options.library}; build it with `cargo build --release -p paceline-python`")
    return Results(options.out, options.library)


def package(folder, library):
    """The package of this checkout with a library beside it."""
    (folder / "paceline").mkdir()
    for file in (ROOT / "python/paceline").iterdir():
        (folder / "paceline" / file.name).symlink_to(file)
    (folder / "paceline/libpaceline_python.so").symlink_to(library)
    info = folder / "paceline-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.distributed.backends]\npaceline = paceline.torch:register\n")


def round_of(backend, world, options, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [options.python, __file__, "--measure", backend, str(world), str(port), options.only]
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'benches'}", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(world)]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{backend} with {world} ranks failed")
    return [json.loads(line) for line in said[0].splitlines()]


def table(lines):
    print(f"\n{lines[0]['machine']}, commit {lines[0]['commit']}; us: median (quartiles)\n")
    print("| ranks | operation | Gloo | Paceline | Gloo by Paceline |\n|---|---|---|---|---|")
    times = {}
    for line in lines:
        if line["record"] == "time":
            times.setdefault((line["ranks"], line["row"]), {}).setdefault(line["backend"], []).append(line["seconds"] * 1e6)
    for (ranks, row), by_backend in times.items():
        cells = [cell(by_backend[backend], ",.1f") for backend in BACKENDS]
        ratio = median(by_backend["gloo"]) / median(by_backend["paceline"])
        print(f"| {ranks} | {row} | {' | '.join(cells)} | {ratio:.2f} |")


def main():
    parser = arguments(__doc__, OUT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.table:
        return table(newest(options.out, options.table))
    lines = measurements(options)
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder), options.library.resolve())
        for number in range(options.rounds):
            for world in map(int, options.ranks.split(",")):
                for backend in BACKENDS[:: 1 if number % 2 else -1]:
                    for time_of in round_of(backend, world, options, folder):
                        lines.add(record="time", round=number, ranks=world, backend=backend, **time_of)
    table(lines.end())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        backend, world, port, only, rank = sys.argv[2:]
        measure(backend, int(rank), int(world), int(port), only)
    else:
        main()
