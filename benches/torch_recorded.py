#!/usr/bin/env python3
"""Times training steps with DistributedDataParallel on the backend `paceline`, with and without a run directory, in alternating rounds.

Usage: benches/torch_recorded.py [--rounds N] [--steps N] [--python PYTHON] [--library FILE] [--table]

Appends to docs/benchmarks/torch_recorded.jsonl and prints how much longer a step takes when it is recorded, and how much more processor time rank 0
takes: medians over the rounds, with quartiles. PYTHON and FILE are as for `torch_backend.py`. Two ranks with one thread each go through all rounds in the same processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import cell, newest, path
from torch_backend import ROOT, arguments, measurements, package

OUT = path("torch_recorded.jsonl")
WORLD = 2
# Hidden units of three layers, samples of a rank's batch, and MB of a bucket.
MODELS = {"small": (64, 8, 25), "middle": (512, 32, 1), "large": (1024, 64, 2)}


def measure(rank, steps, rounds, folder):
    """One rank: prints the median seconds of a step of each round, on rank 0."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)

    def trained(units, samples, bucket_mb):
        dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        layers = [part for _ in range(3) for part in (torch.nn.Linear(units, units), torch.nn.ReLU())]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        rows = torch.utils.data.TensorDataset(torch.randn(samples * steps, units))
        taken, last, begun = [], time.perf_counter(), time.process_time()
        for (batch,) in torch.utils.data.DataLoader(rows, samples):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            now = time.perf_counter()
            taken.append(now - last)
            last = now
        dist.destroy_process_group()
        return median(taken[3:]), (time.process_time() - begun) / steps

    for number in range(rounds):
        for name, model in MODELS.items():
            for is_recorded in (True, False) if number % 2 else (False, True):
                os.environ["PACELINE_RUN_DIR"] = f"{folder}/run" if is_recorded else ""
                seconds, processor_seconds = trained(*model)
                if rank == 0:
                    told = {"seconds": seconds, "processor_seconds": processor_seconds}
                    print(json.dumps({"round": number, "model": name, "recorded": is_recorded, **told}), flush=True)


def table(lines):
    print(f"\n{lines[0]['machine']}, commit {lines[0]['commit']}; median (quartiles)\n")
    print("| model | ms of a step | recorded, % longer | processor time, % more |\n|---|---|---|---|")
    for name in MODELS:
        by_round = {}
        for line in lines:
            if line["record"] == "time" and line["model"] == name:
                by_round.setdefault(line["round"], {})[line["recorded"]] = line
        pairs = by_round.values()
        longer, more = ([(pair[True][of] / pair[False][of] - 1) * 100 for pair in pairs] for of in ("seconds", "processor_seconds"))
        plain = cell([pair[False]["seconds"] * 1e3 for pair in pairs], ".2f")
        print(f"| {name} | {plain} | {cell(longer, '+.1f')} | {cell(more, '+.1f')} |")


def main():
    parser = arguments(__doc__, OUT)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if options.table:
        return table(newest(options.out))
    lines = measurements(options)
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder), options.library.resolve())
        command = [options.python, __file__, "--measure", str(options.steps), str(options.rounds), folder]
        env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'benches'}", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(WORLD)]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("a rank failed")
        for line in said[0].splitlines():
            lines.add(record="time", **json.loads(line))
    table(lines.end())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        steps, rounds, folder, rank = sys.argv[2:]
        measure(int(rank), int(steps), int(rounds), folder)
    else:
        main()
