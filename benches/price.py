#!/usr/bin/env python3
"""Measures what an option adds to a step: rounds that train the same model without and with it, in turn.

Usage: benches/price.py [--rounds N] [--only CASE,...] [--baseline OTHER] [PROGRAM]

The cases are `record`, `stragglers` and `snapshots`; by default all are measured. With OTHER, another build, the case `build` is what PROGRAM
adds to it without any option. So a build from before the ranks told each other their times has the price of these numbers, which
travel with every step. PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line,
are appended to docs/benchmarks/price.jsonl. A Markdown table of this run goes to stdout, progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from results import Results, add_program, check_program, path

OUT = path("price.jsonl")
JOB = ["train", "--nproc-per-node", "4", "--shards", "8", "--threads-per-rank", "1", "--usage", "off", "--transport", "shm"]
# One of few large tensors, and one of many small ones.
MODELS = {
    "digits": ["--task", "digits", "--model", "base", "--epochs", "6"],
    "lm": ["--task", "lm", "--layers", "4", "--width", "64", "--heads", "4", "--context", "32", "--global-batch", "64", "--epochs", "1"],
}
# Options of both, and the ones that have a price. No rank may leave, so that both have four.
CASES = {
    "record": ([], ["--record", "100"]),
    "stragglers": (["--recovery", "live"], ["--exclude-stragglers", "4"]),
    "snapshots": ([], ["--snapshot-every", "100"]),
}
BUILD = "build"
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
    print("| what | model, 4 ranks, 8 shards, shm | rounds | without, ms | with, ms | adds (quartiles of the rounds) |\n|---|---|---:|---:|---:|---:|")
    for case, model in itertools.product([*CASES, BUILD], MODELS):
        rounds = [line for line in lines if (line["record"], line.get("case"), line.get("model")) == ("round", case, model)]
        if len(rounds) > 1:
            ratios = [line["with_seconds"] / line["plain_seconds"] for line in rounds]
            low, middle, high = (f"{(ratio - 1) * 100:+.1f} %" for ratio in quantiles(ratios, method="inclusive"))
            plain, priced = (f"{median(line[key] for line in rounds) * 1e3:.3f}" for key in ("plain_seconds", "with_seconds"))
            what = f"`{' '.join(CASES[case][1])}`" if case in CASES else "this build"
            print(f"| {what} | `{' '.join(MODELS[model])}` | {len(rounds)} | {plain} | {priced} | {middle} ({low} to {high}) |")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--baseline")
    add_program(parser)
    options = parser.parse_args()
    check_program(parser, options.program)
    cases = {case: CASES[case] for case in options.only.split(",") if case in CASES}
    if not cases:
        parser.error(f"--only takes {', '.join(CASES)}")
    # By case: a program and its options, without and with what has a price.
    sides = {case: [(options.program, usual), (options.program, [*usual, *priced])] for case, (usual, priced) in cases.items()}
    if options.baseline:
        check_program(parser, options.baseline)
        sides = {BUILD: [(options.baseline, []), (options.program, [])]}
    results = Results(OUT, options.program)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for (case, of_case), (model, of_model) in itertools.product(sides.items(), MODELS.items()):
            measured = {}
            # The order alternates, in case that the machine slows down.
            for name, (program, more) in list(zip(("plain_seconds", "with_seconds"), of_case))[:: 1 if number % 2 else -1]:
                measured[name] = step_seconds(program, [*of_model, *more])
            results.add(record="round", case=case, round=number, model=model, **measured)
    table(results.end())


if __name__ == "__main__":
    main()
