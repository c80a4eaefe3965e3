#!/usr/bin/env python3
"""Measures what `--record` adds to a step: rounds that train the same model without and with it, in turn.

Usage: benches/record.py [--rounds N] [PROGRAM]

PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line, are appended to
docs/benchmarks/record.jsonl. A Markdown table of this run goes to stdout, progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from results import Results, add_program, check_program, path

OUT = path("record.jsonl")
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
    add_program(parser)
    options = parser.parse_args()
    check_program(parser, options.program)
    results = Results(OUT, options.program)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for model, of_model in MODELS.items():
            measured = {}
            # The order alternates, in case that the machine slows down.
            for name, more in [("plain_seconds", []), ("recorded_seconds", RECORD)][:: 1 if number % 2 else -1]:
                measured[name] = step_seconds(options.program, [*of_model, *more])
            results.add(record="round", round=number, model=model, **measured)
    table(results.end())


if __name__ == "__main__":
    main()
