#!/usr/bin/env python3
"""Times a training step of the workloads of `examples/step_time` on CPUs, beside PyTorch, in alternating rounds.

Usage: benches/step_time.py [--rounds N] [--workloads LIST] [--threads LIST] [--ranks LIST] [--seconds N] [--before PROGRAM] [--python PYTHON] [--table]

Appends to docs/benchmarks/step_time.jsonl and prints a table of medians with quartiles. One rank has each number of threads, with the widest
instructions of the processor and limited to AVX2, as far as a library can be told: Paceline's kernels by PACELINE_ISA, PyTorch's by
ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS. Several ranks have one thread each: `paceline run`, and PyTorch's
DistributedDataParallel on Gloo. PYTHON is one that has PyTorch, in eager mode and, if a C++ compiler is there, compiled by torch.compile. PROGRAM is an earlier build of
the example to compare with. A run stops after about N seconds (5). `--table` prints the table of the newest run again.
Build first: `cargo build --release -p paceline --bin paceline --example step_time`. CARGO_TARGET_DIR is heeded.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from results import ROOT, Results, cell, newest, path

OUT = path("step_time.jsonl")
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
PROGRAM = BUILT / "examples/step_time"
PEER = ROOT / "tools/gpu/peer_step.py"
# Memory that a step frees is kept for the next, in huge pages, for both libraries; see docs/programs.md.
KEPT = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.hugetlb=1"}
AVX2 = {"PACELINE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
ISAS = {"widest": {}, "avx2": AVX2}


def command(library, options, ranks):
    if library in ("paceline", "before"):
        program = [str(PROGRAM) if library == "paceline" else options.before]
        return program if ranks == 1 else [str(BUILT / "paceline"), "run", "--nproc-per-node", str(ranks), *program]
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [options.python, *launch, str(PEER), "--device", "cpu", *(["--compile"] if library == "torch, compiled" else [])]


def seconds(words, threads, isa, cache):
    counts = {name: str(threads) for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")}
    # torch.compile would find the code of the wider instructions, and fail.
    variables = {**ISAS[isa], "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, isa)}
    done = subprocess.run(words, env={**os.environ, **counts, **KEPT, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed: {done.stderr}")
    # A launcher puts the rank before the object.
    line = next(line for line in reversed(done.stdout.splitlines()) if "step_seconds" in line)
    return json.loads(line[line.index("{") :])["step_seconds"]


def table(lines):
    steps = [line for line in lines if line["record"] == "step"]
    libraries = list(dict.fromkeys(line["library"] for line in steps))
    print(f"\n{lines[0]['machine']}, commit {lines[0]['commit']}; ms a step: median (quartiles)\n")
    print(f"| workload | ranks x threads | instructions | {' | '.join(libraries)} | PyTorch's best by Paceline |")
    print("|---|---|---|" + "---:|" * (len(libraries) + 1))
    rows = {}
    for line in steps:
        row = rows.setdefault((line["workload"], f"{line.get('ranks', 1)} x {line['threads']}", line["isa"]), {})
        row.setdefault(line["library"], []).append(line["seconds"])
    for key, times in rows.items():
        cells = [cell([time * 1e3 for time in times[library]], ".1f") if library in times else "" for library in libraries]
        peers = [times[library] for library in times if library.startswith("torch")]
        best = min(peers, key=median, default=[])
        ratio = f"{median(theirs / ours for theirs, ours in zip(best, times['paceline'])):.2f}" if best else ""
        print(f"| {' | '.join([*key, *cells, ratio])} |")


def main():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default="mlp,resnet20,gpt,resnet50,vit")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--before")
    parser.add_argument("--python")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(newest(OUT))
    libraries = ["paceline"]
    if options.before:
        libraries.append("before")
    if options.python:
        libraries.append("torch")
        if shutil.which("g++"):
            libraries.append("torch, compiled")
    for program in (PROGRAM, BUILT / "paceline", options.before, options.python):
        if program and not os.access(program, os.X_OK):
            parser.error(f"there is no program {program}")
    # Ranks, threads of each, instructions.
    places = [(1, threads, isa) for threads in options.threads for isa in ISAS if 1 in options.ranks]
    places += [(ranks, 1, "widest") for ranks in options.ranks if ranks > 1]
    limits = ["--steps", "15", "--warmup", "3", "--seconds", str(options.seconds)]
    results = Results(OUT, PROGRAM)
    cache = tempfile.TemporaryDirectory()
    for number in range(options.rounds):
        for workload in options.workloads.split(","):
            for ranks, threads, isa in places:
                for library in libraries:
                    words = [*command(library, options, ranks), "--workload", workload, *limits]
                    place = {"workload": workload, "library": library, "ranks": ranks, "threads": threads, "isa": isa}
                    taken = seconds(words, threads, isa, cache.name)
                    print(f"round {number + 1}: {', '.join(map(str, place.values()))}: {taken * 1e3:.1f} ms", file=sys.stderr)
                    results.add(record="step", round=number, **place, seconds=taken)
    table(results.end())


if __name__ == "__main__":
    main()
