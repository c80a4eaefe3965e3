#!/usr/bin/env python3
"""A Markdown table of one run of benches/layouts.sh: the step of each layout, and the time that it adds to computing without
other ranks. Usage: benches/layouts-table.py FILE [STARTED], by default the newest run"""

import json
import sys
from collections import defaultdict
from fractions import Fraction
from statistics import median, quantiles

LIBRARIES = "paceline", "torch"


def cell(values):
    """The median in milliseconds, and the quartiles."""
    middle = f"{median(values) * 1e3:.1f}"
    if len(values) < 2:
        return middle
    low, _, high = quantiles(values, method="inclusive")
    return f"{middle} ({low * 1e3:.1f} to {high * 1e3:.1f})"


def main(path, started=None):
    with open(path, encoding="utf-8") as text:
        lines = [json.loads(line) for line in text]
    started = started or lines[-1]["started"]
    lines = [line for line in lines if line["started"] == started]
    apart, steps, added = defaultdict(dict), defaultdict(list), defaultdict(list)
    rows = {}
    for line in lines:
        if line["record"] == "apart":
            apart[line["library"], line["job"]][line["round"]] = line["step_seconds"]
        elif line["record"] == "layout":
            row = line["layout"], line["ranks"]
            rows[row] = line["options"]
            seconds = line["step_seconds"]
            alone = apart[line["library"], line["apart"]][line["round"]] * Fraction(line["part"])
            steps[row, line["library"]].append(seconds)
            added[row, line["library"]].append(float(seconds - alone))
    if not rows:
        sys.exit(f"layouts-table: {path}: there is no layout of {started}")
    present = [library for library in LIBRARIES if any((row, library) in steps for row in rows)]
    heads = "".join(f" {library}, ms |" for library in present)
    heads += "".join(f" {library} adds, ms |" for library in present)
    print(f"| layout | ranks | options |{heads}\n|---|---:|---|" + "---:|" * 2 * len(present))
    for (layout, ranks), options in rows.items():
        cells = [cell(steps[(layout, ranks), library]) for library in present]
        cells += [cell(added[(layout, ranks), library]) for library in present]
        print(f"| {layout} | {ranks} | {options and f'`{options}`'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
