#!/usr/bin/env python3
"""Times training steps with DistributedDataParallel on the backend `paceline`, with and without a run directory, in rounds whose order changes.

Usage: benches/torch_recorded.py [--rounds N] [--python PYTHON] [--library FILE]
       benches/torch_recorded.py --table [RUNS]

Appends to docs/benchmarks/torch_recorded.jsonl and prints how much longer a step takes when it is recorded, and how much more processor time rank 0
takes, among the first steps of a job and among later ones, and what the calls and the thread take that record: medians over the rounds, with quartiles. PYTHON and FILE are as for `torch_backend.py`. Two
ranks with one thread each go through all rounds in the same processes. `--table` prints the table of the file's last runs again.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import cell, newest, path
from torch_backend import ROOT, arguments, measurements, package

OUT = path("torch_recorded.jsonl")
WORLD = 2
# How often in a round, hidden units of three layers, samples of a rank's batch, and MB of a bucket.
MODELS = {"small": (4, 64, 8, 25), "middle": (2, 512, 32, 1), "large": (1, 1024, 64, 2)}
WARMUP, STEPS = 3, 60
# Steps that only tell their phases.
TOLD = 5000
# Steps before those that are recorded: a quarter of the first ones has spans, and of the later ones none.
AFTER = {"plain": None, "first": 0, "later": 1 << 20}


def thread_seconds(name):
    """Processor time of this process' threads with this word in their name."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if name in (task / "comm").read_text()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(rank, rounds, folder):
    """One rank: prints the mean seconds of a step of each round, on rank 0."""
    import torch
    import torch.distributed as dist
    from paceline import _library as library
    from paceline.torch import phase
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)

    def trained(units, samples, bucket_mb):
        dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        layers = [part for _ in range(3) for part in (torch.nn.Linear(units, units), torch.nn.ReLU())]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        rows = torch.utils.data.TensorDataset(torch.randn(samples * (WARMUP + STEPS), units))
        for step, (batch,) in enumerate(torch.utils.data.DataLoader(rows, samples)):
            if step == WARMUP:
                begun, processor_begun = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        taken, processor = time.perf_counter() - begun, time.process_time() - processor_begun
        # The thread that writes looks every half second.
        time.sleep(0.6)
        notes = thread_seconds("notes")
        dist.destroy_process_group()
        return {"seconds": taken / STEPS, "processor_seconds": processor / STEPS, "notes_seconds": notes / (WARMUP + STEPS)}

    def told(after):
        """What a step takes that only tells its phases."""
        os.environ["PACELINE_RUN_DIR"] = f"{folder}/run" if after is not None else ""
        phase.go_on_after(after or 0)
        dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        begun = time.perf_counter()
        for _ in range(TOLD):
            for entered in (library.DATA_LOADER, library.FORWARD, library.BACKWARD, library.OWN_CODE):
                phase._enter(entered)
            phase.go_on_after(phase.steps() + 1)
            phase._enter(library.OWN_CODE)
        taken = time.perf_counter() - begun
        dist.destroy_process_group()
        return taken / TOLD

    for number in range(rounds):
        line = {"record": "told", "round": number, **{how: told(after) for how, after in AFTER.items()}}
        if rank == 0:
            print(json.dumps(line), flush=True)

    for number in range(rounds):
        for name, (repeats, *model) in MODELS.items():
            for repeat in range(repeats):
                line = {"record": "time", "round": number * repeats + repeat, "model": name}
                for how in random.Random(repr(line)).sample(list(AFTER), len(AFTER)):
                    os.environ["PACELINE_RUN_DIR"] = f"{folder}/run" if AFTER[how] is not None else ""
                    phase.go_on_after(AFTER[how] or 0)
                    line[how] = trained(*model)
                if rank == 0:
                    print(json.dumps(line), flush=True)


def table(lines):
    print(f"\n{lines[0]['machine']}, commit {lines[0]['commit']}; median (quartiles)\n")
    columns = [f"{how} steps, % {what}" for what in ("longer", "more processor time") for how in AFTER if AFTER[how] is not None]
    print(f"| model | rounds | ms of a step | {' | '.join(columns)} |\n|---|---:|{'---|' * (1 + len(columns))}")
    for name in MODELS:
        times = [line for line in lines if line["record"] == "time" and line["model"] == name]
        cells = [cell([line["plain"]["seconds"] * 1e3 for line in times], ".2f")]
        for of in ("seconds", "processor_seconds"):
            for how in list(AFTER)[1:]:
                cells.append(cell([(line[how][of] / line["plain"][of] - 1) * 100 for line in times], "+.1f"))
        print(f"| {name} | {len(times)} | {' | '.join(cells)} |")
    print("\n| us of a step | first steps | later steps |\n|---|---|---|")
    calls = [line for line in lines if line["record"] == "told"]
    print(f"| the program's calls | {' | '.join(cell([(line[how] - line['plain']) * 1e6 for line in calls], '.1f') for how in list(AFTER)[1:])} |")
    for name in MODELS:
        times = [line for line in lines if line["record"] == "time" and line["model"] == name and "notes_seconds" in line["plain"]]
        if times:
            print(f"| the thread, {name} | {' | '.join(cell([line[how]['notes_seconds'] * 1e6 for line in times], '.1f') for how in list(AFTER)[1:])} |")


def main():
    parser = arguments(__doc__, OUT)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.table:
        return table(newest(options.out, options.table))
    lines = measurements(options)
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder), options.library.resolve())
        command = [options.python, __file__, "--measure", str(options.rounds), folder]
        env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'benches'}", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(WORLD)]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("a rank failed")
        for line in said[0].splitlines():
            lines.add(**json.loads(line))
    table(lines.end())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        rounds, folder, rank = sys.argv[2:]
        measure(int(rank), int(rounds), folder)
    else:
        main()
