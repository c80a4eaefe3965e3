#!/usr/bin/env python3
"""Measures all-reduces and training steps between hosts with a slow or lossy network between them, beside PyTorch's over Gloo.

Usage: benches/slow_networks.py [--rounds N] [--networks "NAME;..."] [--shapes HxR,...] [--seconds S] [--steps] [--python PYTHON] [PROGRAM]
       benches/slow_networks.py --table

The hosts are network namespaces and the network is benches/shaper.py: packets are lost and late there, and the kernel's TCP repairs that. HxR
are R ranks on each of H hosts, by default 2x1. A round runs every library once in every network, one after another: Paceline over `tcp` with 1, 2, 4
and 8 connections of each pair, over `hierarchical` where hosts have several ranks, and Gloo. `--steps` times training steps of the perceptron
of examples/step_time instead, on Gloo with DistributedDataParallel, and Paceline's local SGD, which averages every eighth step.

PROGRAM is the `paceline` to run, by default target/release/paceline; for `--steps` examples/step_time has to lie in a folder beside it. PYTHON is
one that has PyTorch. Raw results, one JSON object per line, are appended to docs/benchmarks/slow_networks.jsonl; `--table` prints Markdown tables of
the whole file, progress goes to stderr. It needs root.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from results import Results, add_program, cell, check_program, path

HERE = Path(__file__).resolve().parent
OUT = path("slow_networks.jsonl")
PEERS = {"bench": HERE / "peers/gloo.py", "step": HERE.parent / "tools/gpu/peer_step.py"}
# As fast as the shaper moves packets both ways beside two ranks on two cores, with room to spare.
MBIT = "mbit=300"
NETWORKS = {
    "300 Mbit/s": [MBIT],
    "300 Mbit/s, 1 ms": [MBIT, "delay_ms=1"],
    "300 Mbit/s, 10 ms": [MBIT, "delay_ms=10"],
    "100 Mbit/s": ["mbit=100"],
    "300 Mbit/s, 1 ms, 0.1 % loss": [MBIT, "delay_ms=1", "loss=0.1"],
    "300 Mbit/s, 1 ms, 1 % loss": [MBIT, "delay_ms=1", "loss=1"],
    "100 Mbit/s, 10 ms, 0.1 % loss": ["mbit=100", "delay_ms=10", "loss=0.1"],
}
SIZES = [64 << 10, 1 << 20, 4 << 20]
PERIOD = 8
STEPS = ["--workload", "mlp", "--steps", str(PERIOD), "--warmup", "2"]
# Of one library in one network.
SECONDS_MAX = 170


class Hosts:
    """Namespaces with a network between them, until the end of the `with`."""

    def __init__(self, count, settings):
        self.count, self.settings = count, settings

    def __enter__(self):
        words = [sys.executable, HERE / "shaper.py", "--hosts", str(self.count), *self.settings]
        self.shaper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.names = self.shaper.stdout.readline().split()
        if len(self.names) != self.count:
            sys.exit("slow_networks: the shaper did not start")
        return self

    def __exit__(self, *_):
        self.shaper.stdin.close()
        self.shaper.wait()

    def run(self, local, words, variables):
        """Runs a program as all ranks; the last JSON lines of rank 0, by the clock of the slowest."""
        world = self.count * local
        shared = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "SLURM_", "TORCHELASTIC_"))}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500",
                   "GLOO_SOCKET_IFNAME": "eth0", "PACELINE_JOB_TOKEN": "5" * 64, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **variables}
        ranks = []
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local), "GROUP_WORLD_SIZE": str(self.count)}
            command = ["ip", "netns", "exec", self.names[rank // local], *map(str, words)]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=shared | own, stdout=out, stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True))
        try:
            out, err = ranks[0].communicate(timeout=SECONDS_MAX)
            codes = [rank.wait(timeout=10) for rank in ranks]
        except subprocess.TimeoutExpired:
            return [], f"took more than {SECONDS_MAX} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return lines, None if not any(codes) else err.strip().splitlines()[-1:]


def libraries(options, local):
    """Names, commands and variables of what is compared."""
    bench = [options.program, "bench", "all-reduce", "--sizes", ",".join(map(str, SIZES)), "--seconds", str(options.seconds), "--json"]
    if options.steps:
        step = [Path(options.program).parent / "examples/step_time", *STEPS]
        yield "tcp", step, {"PACELINE_TRANSPORT": "tcp"}
        yield "local SGD", [*step, "--comm-hook", f"localsgd:{PERIOD}"], {"PACELINE_TRANSPORT": "tcp"}
        yield "Gloo", [options.python, PEERS["step"], *STEPS, "--device", "cpu"], {}
        return
    for sockets in (1, 2, 4, 8):
        yield f"tcp, {sockets}", bench, {"PACELINE_TRANSPORT": "tcp", "PACELINE_SOCKETS_PER_PEER": str(sockets)}
    if local > 1:
        yield "hierarchical", bench, {"PACELINE_TRANSPORT": "hierarchical"}
    yield "Gloo", [options.python, PEERS["bench"], options.seconds, *SIZES], {}


def measured(line):
    """What is kept of a library's line."""
    if line.get("record") == "timing":
        return {"bytes": line["bytes"], "seconds": line["p50_us"] / 1e6, "slowest": line["p99_us"] / 1e6, "wrong": line["wrong"]}
    return {"bytes": None, "seconds": line["streamed_seconds"], "slowest": line["max_seconds"]} if "streamed_seconds" in line else None


def shown(seconds):
    if not seconds:
        return ""
    form = ".0f" if median(seconds) >= 0.1 else ".3g"
    return cell([one * 1e3 for one in seconds], form) if len(seconds) > 1 else f"{seconds[0] * 1e3:{form}}"


def table(lines):
    """Milliseconds, in a table for each number of hosts and ranks."""
    tables, lines = [], [line for line in lines if line["record"] == "time"]
    for shape, is_step in dict.fromkeys((line["shape"], line["bytes"] is None) for line in lines):
        those = [line for line in lines if (line["shape"], line["bytes"] is None) == (shape, is_step)]
        libraries = sorted(dict.fromkeys(line["library"] for line in those), key="Gloo".__eq__)
        hosts, local = shape.split("x")
        rows = [f"{hosts} hosts, ranks on each: {local}, {'a training step' if is_step else 'an all-reduce'} in ms", "",
                f"| network | {'' if is_step else 'size | '}{' | '.join(libraries)} |", "|---|" + "---:|" * (len(libraries) + (not is_step))]
        for network, size in dict.fromkeys((line["network"], line["bytes"]) for line in those):
            cells = [shown([line["seconds"] for line in those if (line["network"], line["bytes"], line["library"]) == (network, size, library)])
                     for library in libraries]
            rows.append(f"| {network} | {'' if is_step else f'{size >> 10} KiB | '}{' | '.join(cells)} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", default=";".join(NETWORKS))
    parser.add_argument("--shapes", default="2x1")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--table", action="store_true")
    add_program(parser)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in OUT.read_text(encoding="utf-8").splitlines()]))
        return 0
    check_program(parser, options.program)
    results, failed = Results(OUT, options.program), False
    for number in range(options.rounds):
        for network in options.networks.split(";"):
            for shape in options.shapes.split(","):
                hosts, local = map(int, shape.split("x"))
                with Hosts(hosts, NETWORKS[network]) as names:
                    for library, words, variables in libraries(options, local):
                        lines, error = names.run(local, words, variables)
                        place = {"round": number, "network": network, "shape": shape, "library": library}
                        print(f"{place} {error or ''}", file=sys.stderr)
                        for line in filter(None, map(measured, lines)):
                            results.add(record="time", **place, **line)
                        if error:
                            failed = True
                            results.add(record="failure", **place, error=error)
    print(table(results.end()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
