#!/usr/bin/env python3
"""Measures what an option adds to a step: rounds that train the same model without and with it, in turn.

Usage: benches/price.py [--rounds N] [--only CASE,...] [--baseline OTHER] [PROGRAM]
       benches/price.py --together N [--rounds N] [--baseline OTHER] [--python PYTHON] [PROGRAM]

The cases are `record`, `stragglers` and `snapshots`; by default all are measured. `--together` measures what training together adds: N ranks
against N processes that each train alone at the same time, on the workloads of examples/step_time, with one thread each. OTHER and a PYTHON
that has PyTorch are measured in the same rounds; the ranks of PyTorch's DDP are connected by Gloo. Without it, with OTHER, another build, the case `build` is what PROGRAM
adds to it without any option. So a build from before the ranks told each other their times has the price of these numbers, which
travel with every step. PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line,
are appended to docs/benchmarks/price.jsonl. A Markdown table of this run goes to stdout, progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from results import ROOT, Results, add_program, check_program, path
from step_time import KEPT, PEER

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
TOGETHER = "together"
# Workloads of examples/step_time, and steps that take some seconds.
STEPS = {"mlp": 80, "resnet20": 12, "gpt": 10}
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


def streamed_seconds(commands):
    """The mean time of a step over commands that run at the same time."""
    threads = {name: "1" for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")}
    running = [subprocess.Popen(command, env={**os.environ, **KEPT, **threads}, stdout=subprocess.PIPE, text=True) for command in commands]
    texts = [process.communicate(timeout=SECONDS_MAX)[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"failed: {commands[0]}")
    return sum(json.loads(text[text.index("{"):])["streamed_seconds"] for text in texts) / len(texts)


def measure_together(options, results):
    folders = {"paceline": options.program, "before": options.baseline}
    libraries = {name: [str(Path(program).parent / "examples/step_time")] for name, program in folders.items() if program}
    if options.python:
        libraries["torch"] = [options.python, str(PEER), "--device", "cpu"]
    launch = [options.program, "run", "--usage", "off", "--threads-per-rank", "1", "--nproc-per-node", str(options.together)]
    for number, model in itertools.product(range(options.rounds), STEPS):
        print(f"round {number + 1} of {options.rounds}: {model}", file=sys.stderr)
        for library, command in libraries.items():
            command = [*command, "--workload", model, "--steps", str(STEPS[model]), "--warmup", "4"]
            sides = {"plain_seconds": [command] * options.together, "with_seconds": [[*launch, *command]]}
            # The order alternates, in case that the machine slows down.
            measured = {name: streamed_seconds(sides[name]) for name in sorted(sides, reverse=number % 2)}
            results.add(record="round", case=TOGETHER, round=number, model=model, library=library, ranks=options.together, **measured)


def table_together(lines):
    print("| model | library | ranks | rounds | apart, ms a step | together, ms | samples/s of those apart (quartiles) | adds, ms (quartiles) |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    groups = {}
    for line in lines:
        if line["record"] == "round":
            groups.setdefault((line["model"], line["library"], line["ranks"]), []).append((line["plain_seconds"] * 1e3, line["with_seconds"] * 1e3))
    for (model, library, ranks), pairs in groups.items():
        spread = lambda figures, unit: "{1:{0}} ({2:{0}} to {3:{0}})".format(unit, *(quantiles(figures, method="inclusive")[at] for at in (1, 0, 2)))
        share, added = [plain / both for plain, both in pairs], [both - plain for plain, both in pairs]
        apart, together = (median(side) for side in zip(*pairs))
        print(f"| {model} | {library} | {ranks} | {len(pairs)} | {apart:.2f} | {together:.2f} | {spread(share, '.1%')} | {spread(added, '.2f')} |")


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
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--baseline")
    parser.add_argument("--together", type=int)
    parser.add_argument("--python")
    add_program(parser)
    options = parser.parse_args()
    check_program(parser, options.program)
    if options.together and options.rounds < 2:
        parser.error("--together needs two rounds or more")
    if options.together:
        results = Results(OUT, options.program)
        measure_together(options, results)
        return table_together(results.end())
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
