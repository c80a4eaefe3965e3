#!/usr/bin/env python3
"""Measures live recovery: the time from the SIGKILL of one of four ranks to the next committed step of the other three, and what a
step costs while nothing fails.

Usage: benches/recovery.py [--kills N] [--rounds N] [PROGRAM]

PROGRAM is the `paceline` to run, by default target/release/paceline. Each kill has a job of its own. A step counts as
committed once its record is in the run's ledger, which rank 0 writes after the optimizer's step. A round trains the same model with
and without `--recovery live`, in turn. Raw results, one JSON object per line, are appended to docs/benchmarks/recovery.jsonl. A
Markdown table of this run goes to stdout, progress to stderr.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/benchmarks/recovery.jsonl"
RANKS = 4
JOB = ["train", "--task", "digits", "--nproc-per-node", str(RANKS), "--shards", "8", "--threads-per-rank", "1", "--usage", "off"]
# The jobs that lose a rank are killed before they end.
KILLED = ["--model", "small", "--epochs", "1000", "--recovery", "live"]
PRICED = ["--model", "base", "--epochs", "6", "--transport", "shm"]
TRANSPORTS = "shm", "tcp"
# Steps before a kill, and steps of a round that warm up.
STEPS_BEFORE = range(40, 120)
WARMUP = 20
SECONDS_MAX = 60
POLL_SECONDS = 1e-4


class Follow:
    """The JSON lines of a growing file."""

    def __init__(self, path):
        self.path, self.place, self.rest = path, 0, b""

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
        """When the first such line appeared."""
        limit = time.monotonic() + SECONDS_MAX
        while time.monotonic() < limit:
            if any(is_found(line) for line in self.lines()):
                return time.monotonic()
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


def step_seconds(run, generation_steps=None):
    with open(run / "metrics.jsonl", encoding="utf-8") as text:
        records = [json.loads(line) for line in text if line.endswith("\n")]
    seconds = [record["seconds"] for record in records if record["kind"] == "step"]
    return median(seconds[WARMUP:generation_steps])


def kill(program, transport, dice):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [program, *JOB, *KILLED, "--transport", transport, "--run-dir", run]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ledger = Follow(run / "checkpoints/ledger.jsonl")
            before = dice.choice(STEPS_BEFORE)
            ledger.until(lambda line: line["kind"] == "step" and line["step"] >= before, job)
            rank = dice.randrange(RANKS)
            pid = rank_pid(job.pid, rank)
            # Anywhere in a step.
            time.sleep(dice.random() * 0.01)
            start = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            end = ledger.until(lambda line: line["kind"] == "step" and line["generation"] == 1, job)
            return {"rank": rank, "seconds": end - start, "step_seconds": step_seconds(run, before)}
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(SECONDS_MAX)


def price(program, recovery):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [program, *JOB, *PRICED, "--recovery", recovery, "--run-dir", run]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS_MAX)
        return {"recovery": recovery, "step_seconds": step_seconds(run)}


def milliseconds(values, digits=1):
    return f"{median(values) * 1e3:.{digits}f}"


def table(lines):
    print("| one of 4 ranks is killed | kills | median, ms | p99, ms | longest, ms | a step, ms |\n|---|---:|---:|---:|---:|---:|")
    for transport in TRANSPORTS:
        kills = [line for line in lines if line["record"] == "kill" and line["transport"] == transport]
        if kills:
            seconds = sorted(line["seconds"] for line in kills)
            last = quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
            steps = [line["step_seconds"] for line in kills]
            print(f"| {transport} | {len(kills)} | {milliseconds(seconds)} | {last * 1e3:.1f} | {seconds[-1] * 1e3:.1f} | {milliseconds(steps, 2)} |")
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


def main():
    parser = argparse.ArgumentParser(usage="benches/recovery.py [--kills N] [--rounds N] [PROGRAM]")
    parser.add_argument("--kills", type=int, default=50)
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
    dice = random.Random(7)
    for number in range(options.kills):
        print(f"kill {number + 1} of {options.kills}", file=sys.stderr)
        for transport in TRANSPORTS:
            record(record="kill", round=number, transport=transport, **kill(options.program, transport, dice))
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        # The order alternates, in case that the machine slows down.
        for recovery in ("restart", "live")[:: 1 if number % 2 else -1]:
            record(record="price", round=number, **price(options.program, recovery))
    record(record="end", load=os.getloadavg()[0])
    table(lines)


if __name__ == "__main__":
    main()
