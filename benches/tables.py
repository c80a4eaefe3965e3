#!/usr/bin/env python3
"""Markdown tables of the raw results of benches/collectives.sh: medians over rounds, their spread, and the ratio to each
other library. Usage: benches/tables.py FILE"""

import json
import sys
from collections import defaultdict
from statistics import median

OURS = "paceline"


def size(count):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def number(value):
    """With three digits that count."""
    bounds = (99.95, 0), (9.995, 1), (0.9995, 2), (0.09995, 3)
    digits = next((digits for least, digits in bounds if abs(value) >= least), 4)
    return f"{value:.{digits}f}"


def cell(rounds):
    values = list(rounds.values())
    if len(values) < 2:
        return number(median(values))
    return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"


def ratios(ours, theirs):
    """Round by round, because the machine's speed changes between rounds; of the medians if no round has both."""
    both = {at: theirs[at] / own for at, own in ours.items() if at in theirs}
    return both or {None: median(theirs.values()) / median(ours.values())}


def read(path):
    with open(path, encoding="utf-8") as lines:
        for place, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                line["record"]
            except (ValueError, KeyError, TypeError):
                sys.exit(f"tables: {path}: line {place} is no record")
            line["at"] = (line.get("started", ""), line.get("round", 0))
            yield line


def bound(lines, operation, world, transport, memory):
    """How near an all-reduce in shared memory comes to the speed of the memory itself."""
    rates, shares = {}, defaultdict(dict)
    for line in lines:
        if line["record"] == "streaming" and line["world"] == world and line["shares"]:
            rates[line["at"]] = line["gb_s"]
            for share in line["shares"]:
                shares[share["bytes"]][line["at"]] = share["share"]
    if (operation, transport, memory) == ("all-reduce", "shm", "arena") and rates:
        reached = "".join(f" {size(count)} reaches {cell(shares[count])} of it." for count in sorted(shares))
        print(f"\nAll {world} ranks streaming at once: {cell(rates)} GB/s.{reached}")


def main(path):
    lines = list(read(path))
    timings = [line for line in lines if line["record"] == "timing"]
    settings = defaultdict(lambda: defaultdict(dict))
    for line in timings:
        if line["library"] == OURS:
            key = (line["operation"], line["world"], line["transport"], line.get("memory") or "")
            settings[key][line["bytes"]][line["at"]] = line["p50_us"]
    if not settings:
        sys.exit(f"tables: {path}: there is no timing of `{OURS}`")
    for key in sorted(settings):
        operation, world, transport, memory = key
        peers = defaultdict(dict)
        for line in timings:
            if line["library"] != OURS and (line["operation"], line["world"]) == (operation, world):
                peers[line["library"], line["transport"], line["bytes"]][line["at"]] = line["p50_us"]
        # Another transport only of a library that was not measured over this one.
        every = sorted({(library, way) for library, way, _ in peers})
        columns = [(library, way) for library, way in every if way == transport or (library, transport) not in every]
        print(f"### {operation}, {world} ranks, {transport}" + (f", {memory} memory" if memory else "") + "\n")
        heads = "".join(f" {library} ({way}), us | {library} / paceline |" for library, way in columns)
        print(f"| size | paceline, us |{heads}")
        print("|---:|---:|" + "---:|---:|" * len(columns))
        for count, ours in sorted(settings[key].items()):
            row = f"| {size(count)} | {cell(ours)} |"
            for library, way in columns:
                theirs = peers.get((library, way, count))
                row += f" {cell(theirs)} | {cell(ratios(ours, theirs))} |" if theirs else " - | - |"
            print(row)
        bound(lines, *key)
        print()
    wrong = sum(line.get("wrong") or 0 for line in timings)
    if wrong:
        print(f"**{wrong} elements of all results together are wrong.**")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
