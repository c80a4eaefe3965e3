#!/usr/bin/env python3
"""Measures what `--record` adds to a step: rounds that train the same model without and with it, in turn.

Usage: benches/record.py [--rounds N] [PROGRAM]

PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line, are appended to
docs/benchmarks/record.jsonl. A Markdown table of this run goes to stdout, progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/benchmarks/record.jsonl"
JOB = ["train", "--nproc-per-node", "4", "--shards", "8", "--threads-per-rank", "1", "--usage", "off", "--transport", "shm"]
# One of few large tensors, and one of many small ones.
MODELS = {
    "digits": ["--task", "digits", "--model", "base", "--epochs", "6"],
    "lm": ["--task", "lm", "--layers", "4", "--width", "64", "--heads", "4", "--context", "32", "--global-batch", "64", "--epochs", "1"],
}
RECORD = ["--record", "100"]
# Steps that warm up.
WARMUP = 20
SECONDS_MAX = 300


def step_seconds(program, options):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [program, *JOB, *options, "--run-dir", run]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS_MAX)
        with open(run / "metrics.jsonl", encoding="utf-8") as text:
            records = [json.loads(line) for line in text]
        return median([record["seconds"] for record in records if record["kind"] == "step"][WARMUP:])


def table(lines):
    print("| model, 4 ranks, 8 shards, shm | rounds | without, ms | with, ms | `--record 100` adds (quartiles of the rounds) |\n|---|---:|---:|---:|---:|")
    for model in MODELS:
        rounds = [line for line in lines if line["record"] == "round" and line["model"] == model]
        if len(rounds) > 1:
            ratios = [line["recorded_seconds"] / line["plain_seconds"] for line in rounds]
            low, middle, high = (f"{(ratio - 1) * 100:+.1f} %" for ratio in quantiles(ratios, method="inclusive"))
            plain, recorded = (f"{median(line[key] for line in rounds) * 1e3:.3f}" for key in ("plain_seconds", "recorded_seconds"))
            print(f"| `{' '.join(MODELS[model])}` | {len(rounds)} | {plain} | {recorded} | {middle} ({low} to {high}) |")


def main():
    parser = argparse.ArgumentParser(usage="benches/record.py [--rounds N] [PROGRAM]")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("program", nargs="?", default=str(ROOT / "target/release/paceline"))
    options = parser.parse_args()
    if not os.access(options.program, os.X_OK):
        parser.error(f"there is no program {options.program}")
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    lines = []

    def record(**line):
        lines.append({"started": started, **line})
        with open(OUT, "a", encoding="utf-8") as out:
            print(json.dumps(lines[-1]), file=out)

    record(record="setup", commit=commit.stdout.strip(), program=Path(options.program).parent.name,
           machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}", load=os.getloadavg()[0])
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for model, of_model in MODELS.items():
            measured = {}
            # The order alternates, in case that the machine slows down.
            for name, more in [("plain_seconds", []), ("recorded_seconds", RECORD)][:: 1 if number % 2 else -1]:
                measured[name] = step_seconds(options.program, [*of_model, *more])
            record(record="round", round=number, model=model, **measured)
    record(record="end", load=os.getloadavg()[0])
    table(lines)


if __name__ == "__main__":
    main()
