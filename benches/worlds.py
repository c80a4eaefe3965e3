#!/usr/bin/env python3
"""Measures how the costs of a job grow with its ranks, all of them processes of this machine: the same training, cut into the same 512
shards, on 8 to 512 ranks.

Usage: benches/worlds.py [--worlds N,N...] [--transports T,T...] [PROGRAM]
       benches/worlds.py --table

PROGRAM is the `paceline` to run, by default target/release/paceline. Of each job are measured the time until its ranks have joined and
compared their models, the median step, the time from the last step to the end, memory (PSS: shared pages are divided), threads and open
files of a rank, the processor time of the ranks and of the launcher. A second job of the same size loses a rank after it has joined: the
time until the launcher has ended, and the lines that people are told. Each job may take SECONDS_MAX; one that fails is a line too. Raw
results, one JSON object per line, are appended to docs/benchmarks/worlds.jsonl. A Markdown table of this run goes to stdout, progress
to stderr; --table prints one of the newest job of each size in the file.

Exit codes: 0 done, 1 a job failed, 2 wrong usage."""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import Results, add_program, check_program, path

OUT = path("worlds.jsonl")
WORLDS = "8,64,128,256,512"
SECONDS_MAX = 300
SHARDS = 512
STEPS, STEPS_WARMUP = 24, 4
TICKS = os.sysconf("SC_CLK_TCK")
# Ranks whose memory is read: reading it takes the kernel as long as the rank has pages.
SAMPLED = 16


def job(program, world, transport, run):
    return [program, "train", "--task", "digits", "--model", "tiny", "--shards", str(SHARDS), "--global-batch", str(SHARDS), "--epochs", "8",
            "--threads-per-rank", "1", "--usage", "off", "--timeout-seconds", "200", "--nproc-per-node", str(world), "--transport", transport,
            "--run-dir", str(run), "--recovery", "none"]


def records(run):
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    with open(file, encoding="utf-8") as text:
        return [json.loads(line) for line in text if line.endswith("\n")]


def children(launcher):
    return [int(pid) for thread in Path(f"/proc/{launcher}/task").iterdir() for pid in (thread / "children").read_text().split()]


def field(pid, file, name):
    for row in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if row.startswith(name + ":"):
            return int(row.split()[1])
    return 0


def processor_seconds(pid):
    """Of the process alone, without its children."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / TICKS


def sample(launcher):
    """Medians over some ranks."""
    ranks = [pid for pid in children(launcher) if field(pid, "status", "Threads") > 1]
    some = ranks[:: max(1, len(ranks) // SAMPLED)]
    middle = lambda of: median(map(of, some))
    if not some:
        return {}
    return {
        "pss_bytes": middle(lambda pid: field(pid, "smaps_rollup", "Pss") * 1024),
        "private_bytes": middle(lambda pid: (field(pid, "smaps_rollup", "Private_Clean") + field(pid, "smaps_rollup", "Private_Dirty")) * 1024),
        "threads": middle(lambda pid: field(pid, "status", "Threads")),
        "files": middle(lambda pid: len(os.listdir(f"/proc/{pid}/fd"))),
        "launcher_files": len(os.listdir(f"/proc/{launcher}/fd")),
        "launcher_rss_bytes": field(launcher, "status", "VmRSS") * 1024,
    }


def joined(process, run, started):
    """Waits until the ranks have joined; how long that took, or nothing if the job ended before."""
    while not records(run):
        if process.poll() is not None or time.monotonic() - started > SECONDS_MAX:
            return None
        time.sleep(0.02)
    return time.monotonic() - started


def start(program, world, transport, folder):
    run = Path(folder) / "run"
    out = open(Path(folder) / "out", "wb")
    return subprocess.Popen(job(program, world, transport, run), stdin=subprocess.DEVNULL, stdout=out, stderr=out), run


def told(folder):
    return Path(folder, "out").read_text(errors="replace").splitlines()


def undisturbed(program, world, transport):
    with tempfile.TemporaryDirectory() as folder:
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        process, run = start(program, world, transport, folder)
        join = joined(process, run, started)
        of_ranks, launcher, last_step = {}, 0, 0
        while process.poll() is None and time.monotonic() - started < SECONDS_MAX:
            try:
                launcher = processor_seconds(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                break
            steps = sum(record["kind"] == "step" for record in records(run))
            if steps > STEPS_WARMUP and not of_ranks:
                of_ranks = sample(process.pid)
            if steps == STEPS and not last_step:
                last_step = time.monotonic()
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()
        process.wait()
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        steps = [record["seconds"] for record in records(run) if record["kind"] == "step"][STEPS_WARMUP:]
        lines = told(folder)
        digest = next((row.split()[-1] for row in lines if row.startswith("weights sha256:")), None)
        return {
            "code": process.returncode, "join_seconds": join, "step_seconds": median(steps) if steps else None, "seconds": seconds,
            "end_seconds": time.monotonic() - last_step if last_step else None, "launcher_seconds": launcher,
            "ranks_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - launcher, "lines": len(lines),
            "weights": digest and digest[:16], "error": next((row for row in lines if row.startswith("error")), None), **of_ranks}


def with_a_loss(program, world, transport):
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process, run = start(program, world, transport, folder)
        if joined(process, run, started) is None:
            process.kill()
            process.wait()
            return {"code": process.returncode}
        killed = [pid for pid in children(process.pid) if field(pid, "status", "Threads") > 1][world // 2]
        os.kill(killed, signal.SIGKILL)
        at = time.monotonic()
        process.wait(SECONDS_MAX)
        lines = told(folder)
        error = next((place for place, row in enumerate(lines) if row.startswith("error")), len(lines))
        return {"code": process.returncode, "seconds": time.monotonic() - at, "lines": len(lines) - error,
                "longest_line": max(map(len, lines[error:]), default=0), "error": lines[error] if error < len(lines) else None}


def kept():
    """The file's newest line of each job."""
    lines = [json.loads(line) for line in OUT.read_text(encoding="utf-8").splitlines()]
    newest = {(line["record"], line["transport"], line["world"]): line for line in lines if line["record"] in ("job", "loss")}
    return sorted(newest.values(), key=lambda line: (line["transport"], line["world"]))


def shown(value, form, unit=1.0):
    return "-" if value is None else f"{value / unit:{form}}"


def table(lines):
    rows = ["| transport | ranks | joined after | step | end | PSS of a rank | threads | open files | processor time of a rank | of the launcher | "
            "a killed rank: end after | lines |", "|" + "---|" * 12]
    jobs = {(line["transport"], line["world"]): line for line in lines if line["record"] == "job"}
    losses = {(line["transport"], line["world"]): line for line in lines if line["record"] == "loss"}
    for (transport, world), line in jobs.items():
        loss = losses.get((transport, world), {})
        if line["code"] != 0:
            rows.append(f"| {transport} | {world} | failed: {line['error']} |" + " |" * 9)
            continue
        cells = [transport, str(world), shown(line["join_seconds"], ".2f") + " s", shown(line["step_seconds"], ".0f", 1e-3) + " ms",
                 shown(line["end_seconds"], ".1f") + " s", shown(line.get("pss_bytes"), ".1f", 1e6) + " MB", shown(line.get("threads"), ".0f"),
                 shown(line.get("files"), ".0f"), shown(line["ranks_seconds"] / world, ".2f") + " s", shown(line["launcher_seconds"], ".2f") + " s",
                 shown(loss.get("seconds"), ".1f") + " s", shown(loss.get("lines"), ".0f")]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--worlds", default=WORLDS)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--table", action="store_true")
    add_program(parser)
    options = parser.parse_args()
    if options.table:
        print(table(kept()))
        return 0
    check_program(parser, options.program)
    results = Results(OUT, options.program)
    for transport in options.transports.split(","):
        for world in map(int, options.worlds.split(",")):
            for record, measure in (("job", undisturbed), ("loss", with_a_loss)):
                line = {"record": record, "transport": transport, "world": world, **measure(options.program, world, transport)}
                print(json.dumps(line), file=sys.stderr)
                results.add(**line)
    lines = results.end()
    print(table(lines))
    return int(any(line["record"] == "job" and line["code"] != 0 for line in lines))


if __name__ == "__main__":
    sys.exit(main())
