#!/usr/bin/env python3
"""Times a training step of the workloads of `examples/step_time` on the CPU, beside PyTorch, in alternating rounds.

Usage: benches/step_time.py [--rounds N] [--threads N] [--workloads LIST] [--before PROGRAM] [--python PYTHON] [--table]

Appends to docs/benchmarks/step_time.jsonl and prints a table of medians with quartiles. Each is measured with the widest instructions of the
processor and limited to AVX2, as far as a library can be told: Paceline's kernels by PACELINE_ISA, PyTorch's by ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS. PROGRAM is an earlier build of the example to compare with, PYTHON one that has PyTorch. `--table` prints the table of the newest
run again. Build the example first: `cargo build --release -p paceline --example step_time`.
"""

import argparse
import json
import os
import subprocess
import sys
from statistics import median, quantiles

from results import ROOT, Results, path

OUT = path("step_time.jsonl")
PROGRAM = ROOT / "target/release/examples/step_time"
PEER = ROOT / "tools/gpu/peer_step.py"
# Memory that a step frees is kept for the next, in huge pages, for both libraries; see docs/programs.md.
KEPT = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.hugetlb=1"}
AVX2 = {"PACELINE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
STEPS = ["--steps", "15", "--warmup", "3"]


def seconds(command, threads, variables):
    counts = {name: str(threads) for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(command, env={**os.environ, **counts, **KEPT, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["step_seconds"]


def table(lines):
    setup = lines[0]
    print(f"\n{setup['machine']}, {lines[1]['threads']} thread(s), commit {setup['commit']}\n")
    print("| workload | library | instructions | step, ms (quartiles) | PyTorch's time by this one's |\n|---|---|---|---:|---:|")
    times = {}
    for line in lines:
        if line["record"] == "step":
            times.setdefault((line["workload"], line["library"], line["isa"]), []).append(line["seconds"])
    for (workload, library, isa), all_seconds in times.items():
        low, _, high = quantiles(all_seconds, n=4) if len(all_seconds) > 1 else all_seconds * 3
        peer = times.get((workload, "torch", isa))
        ratio = f"{median(theirs / ours for theirs, ours in zip(peer, all_seconds)):.2f}" if peer else ""
        print(f"| {workload} | {library} | {isa} | {median(all_seconds) * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) | {ratio} |")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workloads", default="mlp,resnet20,gpt")
    parser.add_argument("--before")
    parser.add_argument("--python")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        lines = [json.loads(line) for line in OUT.read_text().splitlines()]
        return table([line for line in lines if line["started"] == lines[-1]["started"]])
    libraries = {"paceline": [str(PROGRAM)]}
    if options.before:
        libraries["before"] = [options.before]
    if options.python:
        libraries["torch"] = [options.python, str(PEER), "--device", "cpu"]
    for command in libraries.values():
        if not os.access(command[0], os.X_OK):
            parser.error(f"there is no program {command[0]}")
    results = Results(OUT, PROGRAM)
    for number in range(options.rounds):
        for workload in options.workloads.split(","):
            for library, command in libraries.items():
                for isa, variables in {"widest": {}, "avx2": AVX2}.items():
                    if library == "before" and isa == "avx2":
                        # It chooses by itself.
                        continue
                    taken = seconds([*command, "--workload", workload, *STEPS], options.threads, variables)
                    print(f"round {number + 1}: {workload}, {library}, {isa}: {taken * 1e3:.1f} ms", file=sys.stderr)
                    results.add(record="step", round=number, threads=options.threads, workload=workload, library=library, isa=isa, seconds=taken)
    table(results.end())


if __name__ == "__main__":
    main()
