#!/usr/bin/env python3
"""Measures live recovery on four ranks: the time from the SIGKILL of one of them to the next committed step of the other three, what the
join of a replacement costs them, the same of PyTorch with SameBits, what torchrun needs for the same, and what a step costs while nothing fails.

Usage: benches/recovery.py [--kills N] [--large N] [--joins N] [--same-bits N] [--torchrun N] [--rounds N] [--seed N] [--python PYTHON] [PROGRAM]
       benches/recovery.py --table [RUNS]

PROGRAM is the `paceline` to run, by default target/release/paceline, and PYTHON one that has torch; without it the jobs of PyTorch are
reported as skipped. They use the package of this checkout with libpaceline_python.so from PROGRAM's folder. Each kill has a job of its own. A
step counts as committed once its record is in the run's ledger, or the job's own file, which rank 0
writes after the optimizer's step. A round trains the same model with and without `--recovery live`, in turn. Raw results, one JSON
object per line, are appended to docs/benchmarks/recovery.jsonl. A Markdown table of this run goes to stdout, progress to stderr;
--table prints that of the file's last runs again.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median, quantiles

from results import ROOT, Results, add_program, check_program, newest, path
from torch_backend import package

OUT = path("recovery.jsonl")
RANKS = 4
JOB = ["train", "--nproc-per-node", str(RANKS), "--shards", "8", "--threads-per-rank", "1", "--usage", "off"]
DIGITS = ["--task", "digits"]
# By name: the model, and the steps before a kill. The jobs that lose a rank are killed before they end.
STATES = {
    "digits": ([*DIGITS, "--model", "small", "--epochs", "1000"], range(40, 120)),
    # 8 million parameters: 97 MB with the optimizer's two moments.
    "100 MB": (["--task", "lm", "--layers", "10", "--width", "256", "--heads", "4", "--context", "16", "--epochs", "1000"], range(6, 12)),
}
TORCH_STATES = {"digits": "small", "100 MB": "large"}
TORCH_JOB = ROOT / "benches/peers/recovery.py"
PRICED = [*DIGITS, "--model", "base", "--epochs", "6", "--transport", "shm"]
TRANSPORTS = "shm", "tcp"
SAME_BITS = {f"SameBits, {transport}": transport for transport in TRANSPORTS}
SYSTEMS = *TRANSPORTS, *SAME_BITS, "torchrun, Gloo: starts all ranks again"
# Seconds after a step in which a rank is killed: about as long as a step.
MOMENTS = {"digits": 0.01, "100 MB": 0.2}
# Steps of the ranks that are left, after the repeated one; the later half tells what a step takes them.
AFTER = 8
# Steps that warm up.
WARMUP = {"digits": 20, "100 MB": 3}
SECONDS_MAX = 120
POLL_SECONDS = 1e-4


class Follow:
    """The JSON lines of a growing file."""

    def __init__(self, path):
        self.path, self.place, self.rest, self.unread = path, 0, b"", []

    def lines(self):
        if not self.path.exists() or self.path.stat().st_size == self.place:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.place)
            new = file.read()
        self.place += len(new)
        *whole, self.rest = (self.rest + new).split(b"\n")
        return [json.loads(line) for line in whole]

    def until(self, is_found, job):
        """When the first such line appeared, and when the last step before it did."""
        limit = time.monotonic() + SECONDS_MAX
        last = None
        while (now := time.monotonic()) < limit:
            self.unread += self.lines()
            while self.unread:
                line = self.unread.pop(0)
                if is_found(line):
                    return now, last
                if is_step()(line):
                    last = now
            if job.poll() is not None:
                sys.exit(f"recovery: the job ended with {job.returncode}")
            time.sleep(POLL_SECONDS)
        sys.exit(f"recovery: nothing happened for {SECONDS_MAX} s")


def rank_pid(launcher, rank):
    """The process of a rank: a child of the launcher with this number in its environment."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    threads = Path(f"/proc/{launcher}/task").iterdir()
    for thread in threads:
        children += (thread / "children").read_text().split()
    for pid in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    sys.exit(f"recovery: there is no rank {rank}")


def step_seconds(run, first, last=None):
    """The median step between these two."""
    with open(run / "metrics.jsonl", encoding="utf-8") as text:
        records = [json.loads(line) for line in text if line.endswith("\n")]
    seconds = [record["seconds"] for record in records if record["kind"] == "step"]
    return median(seconds[first:last])


def is_step(since=0, **expected):
    """A line of the ledger or of `peers/recovery.py`: a step of this generation or a later one, with these values."""
    return lambda line: (line.get("kind", "step") == "step" and line.get("generation", 0) >= since
                         and all(line.get(key) == value for key, value in expected.items()))


def is_step_of_all():
    """The same of a generation that all ranks are in again. The first one that a replacement was invited to may have failed."""
    worlds = [0]

    def is_found(line):
        if line["kind"] == "begin":
            worlds.append(line["world"])
        return line["kind"] == "step" and worlds[-1] == RANKS

    return is_found


def stop(job):
    job.send_signal(signal.SIGTERM)
    job.wait(SECONDS_MAX)


def strike(job, steps, before, rank, within):
    """Kills a rank so long after so many steps. Returns the moment."""
    steps.until(lambda line: is_step()(line) and line["step"] >= before, job)
    pid = rank_pid(job.pid, rank)
    time.sleep(within)
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return start


def kill(program, state, transport, dice, replaces):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [program, *JOB, *STATES[state][0], "--transport", transport, "--run-dir", run]
        return kill_one(command, os.environ, run, run / "checkpoints/ledger.jsonl", state, dice, replaces)


def kill_of_same_bits(program, python, state, transport, dice, replaces):
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder), Path(program).resolve().parent / "libpaceline_python.so")
        command = [program, "run", "--nproc-per-node", str(RANKS), python, TORCH_JOB, folder, TORCH_STATES[state], "same-bits"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": folder, "PACELINE_TRANSPORT": transport}
        return kill_one(command, env, Path(folder), Path(folder) / "metrics.jsonl", state, dice, replaces)


def kill_one(command, env, run, steps, state, dice, replaces):
    program, mode, *rest = command
    restarts = ["--recovery", "live", "--max-restarts", "1" if replaces else "0"]
    job = subprocess.Popen([program, mode, *restarts, *rest], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        steps = Follow(steps)
        before, rank = dice.choice(STATES[state][1]), dice.randrange(RANKS)
        start = strike(job, steps, before, rank, dice.random() * MOMENTS[state])
        end, _ = steps.until(is_step(since=1), job)
        found = {"rank": rank, "seconds": end - start, "step_seconds": step_seconds(run, WARMUP[state], before)}
        if replaces:
            joined, last = steps.until(is_step_of_all(), job)
            # From the last step without the replacement to the first one with it.
            return found | {"gap_seconds": joined - (last or end), "full_seconds": joined - start}
        for _ in range(AFTER):
            steps.until(is_step(since=1), job)
        return found | {"left_step_seconds": step_seconds(run, -AFTER // 2)}
    finally:
        stop(job)


def torchrun(python, state, dice):
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        job = subprocess.Popen([*command, TORCH_JOB, folder, TORCH_STATES[state]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        try:
            steps = Follow(Path(folder) / "metrics.jsonl")
            # After a checkpoint, as that of a job that has run for a while.
            before, rank = dice.choice(STATES[state][1]) + 60, dice.randrange(RANKS)
            start = strike(job, steps, before, rank, dice.random() * MOMENTS[state])
            end, _ = steps.until(is_step(restart=1), job)
            return {"rank": rank, "seconds": end - start}
        finally:
            stop(job)


def price(program, recovery):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [program, *JOB, *PRICED, "--recovery", recovery, "--run-dir", run]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS_MAX)
        return {"recovery": recovery, "step_seconds": step_seconds(run, WARMUP["digits"])}


def milliseconds(values, digits=1):
    return f"{median(values) * 1e3:.{digits}f}"


def row(*cells):
    print(f"| {' | '.join(cells)} |")


def table(lines):
    def of(record, state, transport):
        same = {"record": record, "state": state, "transport": transport}
        return [line for line in lines if same.items() <= line.items()]

    row("one of 4 ranks is killed", "state", "kills", "next step: median, ms", "p99, ms", "longest, ms", "a step of 4, ms", "of the 3 left, ms",
        "beyond that: median, ms")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for transport in SYSTEMS:
        for state in STATES:
            kills = of("kill", state, transport)
            if kills:
                seconds = sorted(line["seconds"] for line in kills)
                last = quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
                steps = [line["step_seconds"] for line in kills if "step_seconds" in line]
                # Fewer ranks compute the same shards, so their step takes longer.
                later = [line for line in kills if "left_step_seconds" in line]
                beyond = [line["seconds"] - line["left_step_seconds"] for line in later]
                row(transport, state, str(len(kills)), milliseconds(seconds), f"{last * 1e3:.1f}", f"{seconds[-1] * 1e3:.1f}",
                    milliseconds(steps, 2) if steps else "", milliseconds([line["left_step_seconds"] for line in later], 2) if later else "",
                    milliseconds(beyond) if beyond else "")
    joins = [(transport, state, of("join", state, transport)) for transport in SYSTEMS for state in STATES]
    if any(found for *_, found in joins):
        print()
        row("and is replaced", "state", "kills", "next step, ms", "the others stand still beyond a step, ms", "all 4 again, ms")
        print("|---|---|---:|---:|---:|---:|")
    for transport, state, found in joins:
        if found:
            still = [line["gap_seconds"] - line["step_seconds"] for line in found]
            row(transport, state, str(len(found)), milliseconds([line["seconds"] for line in found]), milliseconds(still),
                milliseconds([line["full_seconds"] for line in found], 0))
    for line in lines:
        if line["record"] == "skipped":
            print(f"\nSkipped: {line['what']}, because {line['why']}.")
    rounds = {}
    for line in lines:
        if line["record"] == "price":
            rounds.setdefault(line["round"], {})[line["recovery"]] = line["step_seconds"]
    if len(rounds) > 1:
        ratios = [both["live"] / both["restart"] for both in rounds.values()]
        low, middle, high = (f"{(ratio - 1) * 100:+.1f} %" for ratio in quantiles(ratios, method="inclusive"))
        off, live = (milliseconds([both[how] for both in rounds.values()], 3) for how in ("restart", "live"))
        print("\n| a step while nothing fails | rounds | without, ms | live, ms | live adds (quartiles of the rounds) |\n|---|---:|---:|---:|---:|")
        print(f"| `--model base`, 4 ranks, shm | {len(rounds)} | {off} | {live} | {middle} ({low} to {high}) |")


def last_lines(runs):
    # Older lines do not name the model, or say torchrun.
    lines = [{"state": "digits", **line} for line in newest(OUT, runs)]
    return [line | {"transport": SYSTEMS[-1]} if line.get("transport") == "torchrun" else line for line in lines]


def lacks_torch(python):
    if python is None:
        return "no --python was given"
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    return None if found.returncode == 0 else f"{python} has no torch"


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    for name, count in {"kills": 100, "large": 20, "joins": 20, "same-bits": 10, "torchrun": 20, "rounds": 15, "seed": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--python")
    parser.add_argument("--table", nargs="?", type=int, const=1, metavar="RUNS")
    add_program(parser)
    options = parser.parse_args()
    if options.table:
        return table(last_lines(options.table))
    program = options.program
    check_program(parser, program)
    results = Results(OUT, program)
    dice = random.Random(options.seed)
    jobs = [("kill", "digits", options.kills), ("kill", "100 MB", options.large), ("join", "digits", options.joins), ("join", "100 MB", options.joins)]
    for name, state, count in jobs:
        for number in range(count):
            print(f"{name} {number + 1} of {count}, {state}", file=sys.stderr)
            for transport in TRANSPORTS:
                found = kill(program, state, transport, dice, name == "join")
                results.add(record=name, round=number, state=state, transport=transport, **found)
    why = lacks_torch(options.python)
    if why and options.same_bits + options.torchrun:
        results.add(record="skipped", what="the jobs of PyTorch", why=why)
    for number in range(0 if why else options.same_bits):
        print(f"SameBits {number + 1} of {options.same_bits}", file=sys.stderr)
        for name, state, (system, transport) in product(("kill", "join"), STATES, SAME_BITS.items()):
            found = kill_of_same_bits(program, options.python, state, transport, dice, name == "join")
            results.add(record=name, round=number, state=state, transport=system, **found)
    for number in range(0 if why else options.torchrun):
        for state in STATES:
            print(f"torchrun {number + 1} of {options.torchrun}, {state}", file=sys.stderr)
            results.add(record="kill", round=number, state=state, transport=SYSTEMS[-1], **torchrun(options.python, state, dice))
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        # The order alternates, in case that the machine slows down.
        for recovery in ("restart", "live")[:: 1 if number % 2 else -1]:
            results.add(record="price", round=number, **price(program, recovery))
    table(results.end())


if __name__ == "__main__":
    main()
