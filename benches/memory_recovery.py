#!/usr/bin/env python3
"""Measures how long a job with split state takes after the SIGKILL of a rank, with checkpoints in memory and with files.

Usage: benches/memory_recovery.py [--kills N] [PROGRAM]

PROGRAM is the `paceline` to run, by default target/release/paceline. Each kill has a job of its own, whose ranks are started again
once. `next_seconds` ends with the next committed step, `regained_seconds` with the first step that was not committed before the kill.
A step counts as committed once its record is in the run's ledger. `saved_every` is the number of steps between checkpoints. Raw
results, one JSON object per line, are appended to docs/benchmarks/memory_recovery.jsonl. A Markdown table of this run goes to stdout,
progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from recovery import Follow, rank_pid
from results import Results, add_program, check_program, path

OUT = path("memory_recovery.jsonl")
# A million parameters: 12 MB of state.
JOB = ["train", "--task", "lm", "--model", "gpt-1m", "--global-batch", "4", "--shards", "4", "--threads-per-rank", "1", "--epochs", "1000",
       "--recovery", "restart", "--max-restarts", "1", "--usage", "off"]
LAYOUTS = {
    "zero 3, 4 ranks": ["--nproc-per-node", "4", "--zero", "3"],
    "pp 2 x dp 2": ["--nproc-per-node", "4", "--pp", "2"],
    "tp 2": ["--nproc-per-node", "2", "--tp", "2"],
}
SOURCES = {
    "memory": (5, ["--memory-checkpoint", "5"]),
    "file": (5, ["--save-every", "5"]),
    "file, seldom": (50, ["--save-every", "50"]),
}
STEPS_BEFORE = range(60, 100)
SECONDS_MAX = 60


def kill(program, layout, source, dice):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        every, saves = SOURCES[source]
        command = [program, *JOB, *LAYOUTS[layout], *saves, "--run-dir", run]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ledger = Follow(run / "checkpoints/ledger.jsonl")
            before = dice.choice(STEPS_BEFORE)
            ledger.until(lambda line: line["kind"] == "step" and line["step"] >= before, job)
            rank = dice.randrange(int(LAYOUTS[layout][1]))
            pid = rank_pid(job.pid, rank)
            # Anywhere in a step.
            time.sleep(dice.random() * 0.05)
            start = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            seen = {"step": 0, "resumed": None}

            def is_next(line):
                if line["kind"] == "begin" and line["cause"] == "resume":
                    seen["resumed"] = line["step"]
                elif seen["resumed"] is None:
                    seen["step"] = line["step"]
                return line["kind"] == "step" and seen["resumed"] is not None

            # A line behind the wanted one is read with it, so the step after it may be known as well.
            first, _ = ledger.until(is_next, job)
            lost = max(seen["step"], before) - seen["resumed"]
            goal = seen["resumed"] + lost + 1
            regained = first
            if lost > 0:
                regained, _ = ledger.until(lambda line: line["kind"] == "step" and line["step"] >= goal, job)
            return {"rank": rank, "saved_every": every, "lost_steps": lost, "next_seconds": first - start, "regained_seconds": regained - start}
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(SECONDS_MAX)


def table(lines):
    print("| layout | checkpoints | kills | next step, s | quartiles | lost steps | back where it was, s |\n|---|---|---:|---:|---:|---:|---:|")
    for layout in LAYOUTS:
        for source, (every, _) in SOURCES.items():
            kills = [line for line in lines if (line.get("layout"), line.get("source")) == (layout, source)]
            if len(kills) > 1:
                after, lost, regained = ([kill[name] for kill in kills] for name in ("next_seconds", "lost_steps", "regained_seconds"))
                low, middle, high = (f"{seconds:.2f}" for seconds in quantiles(after, method="inclusive"))
                print(f"| {layout} | {source.split(',')[0]}, every {every} steps | {len(kills)} | {middle} | {low} to {high} | {median(lost):.0f} | "
                      f"{median(regained):.2f} |")


def main():
    parser = argparse.ArgumentParser(usage="benches/memory_recovery.py [--kills N] [PROGRAM]")
    parser.add_argument("--kills", type=int, default=10)
    add_program(parser)
    options = parser.parse_args()
    check_program(parser, options.program)
    results = Results(OUT, options.program)
    dice = random.Random(7)
    for number in range(options.kills):
        print(f"kill {number + 1} of {options.kills}", file=sys.stderr)
        for layout in LAYOUTS:
            for source in SOURCES:
                results.add(record="kill", round=number, layout=layout, source=source, **kill(options.program, layout, source, dice))
    table(results.end())


if __name__ == "__main__":
    main()
