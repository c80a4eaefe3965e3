#!/usr/bin/env python3
"""Disturbs long training runs with `paceline chaos` until a number of faults were dealt, and checks that every run ends with the weights of
its undisturbed run, that its ledger proves every sample, and that nothing is left behind.

Usage: tools/soak.py [--faults N] [--per-run N] [--tasks digits,lm] [--transports shm,tcp,hierarchical] [--kinds KIND,...] [--seed N] [--out FILE] [--table FILE] [PROGRAM]

PROGRAM is the `paceline` to run, by default target/release/paceline. Faults are of all kinds that chaos knows but `corrupt`. With that among the
KINDs, runs take snapshots; a rank that is killed before its flipped bit is found may leave other bits, so leave out kinds that kill. When chaos kills the only
launcher, the run is resumed with another number of ranks, from 1 to 8, and over another transport: shared memory, TCP, or both
(hierarchical) for ranks on two pretended hosts. With `nodes` among the transports it also goes on with two launchers, each of which is
started again after it was killed. Raw results, one JSON object per line, are appended to docs/benchmarks/soak.jsonl, or to FILE. The tables of this soak,
or of those in --table FILE, go to stdout, progress to stderr. The folder of a run that failed is kept.

Exit codes: 0 every run survived, 1 one did not, 2 wrong usage."""

import argparse
import itertools
import json
import os
import platform
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/benchmarks/soak.jsonl"
USUAL = ["--shards", "8", "--threads-per-rank", "1", "--usage", "off", "--timeout-seconds", "20"]
TASKS = {
    "digits": ["--task", "digits", "--model", "tiny", "--global-batch", "16", "--epochs", "60", "--evaluate-every", "15", "--save-every", "10"],
    "lm": ["--task", "lm", "--data", "text.txt", "--layers", "2", "--heads", "2", "--width", "16", "--context", "32", "--dropout", "0.1",
           "--clip-norm", "1", "--global-batch", "8", "--epochs", "240", "--evaluate-every", "15", "--save-every", "10"],
}
WORDS = "the ranks of a job add their gradients in one order so that every number has the same bits on any of them".split()
TRANSPORTS = "shm", "tcp", "hierarchical"
FAULTS = "kill,abort,exit,memory,stop,slow,cut,stall,agent"
CORRUPT = "corrupt"
# With flipped bits.
SNAPSHOTS = ["--snapshot-every", "20"]
# Runs with one of so many seeds share the undisturbed run.
SEEDS = 2
HOLD_SECONDS = 0.5
HANG_SECONDS = 90
RUN_SECONDS_MAX = 1800
# Attempts of a run write what they are to this file.
ATTEMPTS = "attempts.jsonl"


def training(folder, task, seed):
    return ["train", "--run-dir", str(folder / "run"), "--seed", str(seed), *TASKS[task], *USUAL]


def attempt(program, folder, task, transports, kinds, seed):
    """Starts the run or goes on with it, as the number of earlier attempts says. Does not return."""
    train = [*training(Path(folder), task, seed % SEEDS), "--resume", "auto", *(SNAPSHOTS if CORRUPT in kinds.split(",") else [])]
    attempts = Path(folder) / ATTEMPTS
    number = len(attempts.read_text().splitlines()) if attempts.exists() else 0
    dice = random.Random(seed * 1000 + number)
    transport = transports[(seed + number) % len(transports)]
    world = 4 if transport == "nodes" else dice.randint(1, 8)
    with open(attempts, "a", encoding="utf-8") as out:
        print(json.dumps({"world": world, "transport": transport, "at": time.monotonic()}), file=out)
    if transport == "nodes":
        two_nodes(program, train)
    live = ["--nproc-per-node", str(world), "--recovery", "live", "--max-restarts", "1000"]
    if transport == "hierarchical":
        on_two_hosts = 'export PACELINE_HOST_ID=host$((LOCAL_RANK % 2)); exec "$@"'
        os.execv(program, [program, "run", *live, "--usage", "off", "--no-python", "sh", "-c", on_two_hosts, "sh", program, *train, "--recovery", "live"])
    os.execv(program, [program, *train, *live, "--transport", transport])


def two_nodes(program, train):
    """Two launchers with two ranks each. A launcher that was killed comes back after two leases: if the one with the store came back at once, the
    other could not tell it from a partition, and would wait. Does not return."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    run = ["run", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "soak", "--rdzv-conf",
           "last_call_timeout=1,lease=1", "--nproc-per-node", "2", "--max-restarts", "1000", "--usage", "off", "--no-python"]
    os.environ["PACELINE_JOB_TOKEN"] = secrets.token_hex(32)
    node = 'while export PACELINE_HOST_ID=$0; do "$@"; code=$?; [ $code = 137 ] || exit $code; sleep 3; done'
    both = f"sh -c '{node}' host0 \"$@\" & first=$!; sh -c '{node}' host1 \"$@\" & wait $! && wait $first"
    os.execv("/bin/sh", ["sh", "-c", both, "sh", program, *run, program, *train])


def undisturbed(program, task, seed):
    """The hash of an undisturbed run, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        started = time.monotonic()
        ended = subprocess.run([program, *training(Path(folder), task, seed), "--nproc-per-node", "1"], cwd=folder, check=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=RUN_SECONDS_MAX)
        return re.search("weights sha256: ([0-9a-f]{64})", ended.stdout)[1], time.monotonic() - started


def prepare(folder):
    dice = random.Random(0)
    (folder / "text.txt").write_text(" ".join(dice.choice(WORDS) for _ in range(600)))


def disturbed(program, task, transports, kinds, seed, faults, reference):
    """One run under faults. Returns its lines, and whether it survived."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-soak."))
    prepare(folder)
    sha256, took = reference
    job = [sys.executable, __file__, "--attempt", str(folder), "--tasks", task, "--transports", ",".join(transports), "--kinds", kinds, "--seed", str(seed),
           program]
    chaos = [program, "chaos", "--json", "--log-dir", str(folder / "logs"), "--kills", str(faults), "--seed", str(seed), "--faults", kinds,
             "--hold-seconds", str(HOLD_SECONDS), "--hang-seconds", str(HANG_SECONDS), "--every-seconds", f"{1.2 * took / faults:.3f}",
             "--leave", str(seed % 2), "--resume", f"--reference=echo weights sha256: {sha256}", "--", *job]
    with open(folder / "chaos.err", "wb") as errors:
        ended = subprocess.run(chaos, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=2 * RUN_SECONDS_MAX, check=False)
    (folder / "chaos.json").write_text(ended.stdout)
    report = json.loads(ended.stdout or '{"dealt": [], "missed": []}')
    ledger = subprocess.run([program, "ledger", "verify", folder / "run"], capture_output=True, text=True, check=False)
    attempts = [json.loads(line) for line in (folder / ATTEMPTS).read_text().splitlines()]
    run = {"record": "run", "task": task, "seed": seed, "weights_sha256": sha256, "faults": len(report["dealt"]),
           "not_dealt": dict(Counter(f"{one['fault']}: {one['why']}" for one in report["missed"])),
           "took_s": report.get("took_s"), "undisturbed_s": round(took, 3), "ended": report.get("ended"), "has_hung": report.get("has_hung"),
           "left_behind": report.get("left_behind"), "same_bits": (report.get("compared") or {}).get("same_bits"),
           "every_sample_once": ledger.returncode == 0, "attempts": [[one["world"], one["transport"]] for one in attempts]}
    lines = [run]
    for one in report["dealt"]:
        of = [each for each in attempts if each["at"] - attempts[0]["at"] <= one["at_s"]] or attempts[:1]
        one["world"], one["transport"] = of[-1]["world"], of[-1]["transport"]
        lines.append({"record": "fault", "task": task, "seed": seed, **{key: value for key, value in one.items() if key not in ("index", "pid")}})
    survived = ended.returncode == 0 and ledger.returncode == 0
    if survived:
        shutil.rmtree(folder)
    else:
        print(f"soak: {task}, seed {seed}, did not survive: {folder}", file=sys.stderr)
        print(ledger.stdout[-2000:] + ledger.stderr[-2000:], file=sys.stderr)
    return lines, survived


def phase(fault):
    """What the rank was doing, without numbers."""
    doing = fault["during"] or "running"
    return re.sub(r"( at|, after) step \d+| #\d+| \(bucket \d+\)", "", doing)


def milliseconds(faults):
    times = [fault["recovery_s"] for fault in faults if fault["recovery_s"] is not None]
    return f"{median(times) * 1e3:.0f} | {max(times) * 1e3:.0f}" if times else "- | -"


def table(lines):
    runs, faults = ([line for line in lines if line["record"] == kind] for kind in ("run", "fault"))
    well = [run for run in runs if run["same_bits"] and run["every_sample_once"] and not run["has_hung"] and not run["left_behind"]]
    worlds = [world for run in runs for world, _ in run["attempts"]]
    print(f"{len(faults)} faults in {len(runs)} runs, {sum(len(run['attempts']) for run in runs)} attempts of {min(worlds)} to {max(worlds)} ranks, "
          f"{sum(run['took_s'] or 0 for run in runs) / 60:.0f} minutes. {len(well)} of {len(runs)} runs ended with the weights of the undisturbed run, "
          "every sample was used once, and nothing was left behind.\n")
    fates = ["continued", "went_on", "restarted", "repaired", "unnoticed", "finished", "failed"]
    print("| fault | dealt | the same ranks continued | the others went on | started again | repaired | unnoticed | the job finished | failed | "
          "recovery, median ms | longest, ms |")
    print("|---|" + "---:|" * 10)
    for kind in sorted({fault["fault"] for fault in faults}, key=[*FAULTS.split(","), CORRUPT].index):
        dealt = [fault for fault in faults if fault["fault"] == kind]
        counts = [sum(fault["fate"] == fate for fault in dealt) for fate in fates]
        print(f"| {kind} | {len(dealt)} | {' | '.join(map(str, counts))} | {milliseconds(dealt)} |")
    for title, key in ("the rank was", phase), ("transport", "transport"), ("task", "task"), ("ranks of the attempt", "world"), ("ranks afterwards", "ranks"):
        groups = Counter(key(fault) if callable(key) else fault[key] for fault in faults)
        print(f"\n| {title} | faults |\n|---|---:|")
        for name, number in sorted(groups.items()):
            print(f"| {name} | {number} |")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--per-run", type=int, default=50)
    parser.add_argument("--tasks", default="digits,lm")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--kinds", default=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs="?", default=str(ROOT / "target/release/paceline"))
    options = parser.parse_args()
    if options.table:
        table([json.loads(line) for line in options.table.read_text().splitlines()])
        return 0
    if not os.access(options.program, os.X_OK) or not set(options.tasks.split(",")) <= set(TASKS):
        parser.error(f"there is no program {options.program}, or no task {options.tasks}")
    program = os.path.realpath(options.program)
    transports = options.transports.split(",")
    if not set(transports) <= {*TRANSPORTS, "nodes"}:
        parser.error(f"no transports {options.transports}")
    if options.attempt:
        attempt(program, options.attempt, options.tasks, transports, options.kinds, options.seed)
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines, references, failed = [], {}, 0

    def record(new):
        lines.extend(new)
        with open(options.out, "a", encoding="utf-8") as out:
            for line in new:
                print(json.dumps({"started": started, **line}), file=out)

    record([{"record": "setup", "commit": commit.stdout.strip(), "load": os.getloadavg()[0],
             "machine": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {platform.system()} {platform.release()}"}])
    for seed, task in zip(itertools.count(options.seed), itertools.cycle(options.tasks.split(","))):
        left = options.faults - sum(line["record"] == "fault" for line in lines)
        if left <= 0:
            break
        print(f"{left} faults left: {task}, seed {seed}", file=sys.stderr)
        key = task, seed % SEEDS
        if key not in references:
            references[key] = undisturbed(program, *key)
        new, survived = disturbed(program, task, transports, options.kinds, seed, min(left, options.per_run), references[key])
        record(new)
        failed += not survived
    table(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
