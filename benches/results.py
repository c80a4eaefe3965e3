"""Raw results of a script in this folder: JSON lines in docs/benchmarks, a `setup` line first and an `end` line last."""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent


def path(name):
    return ROOT / "docs/benchmarks" / name


def newest(out, runs=1):
    """The lines of the last runs in a file."""
    lines = [json.loads(line) for line in Path(out).read_text(encoding="utf-8").splitlines()]
    started = list(dict.fromkeys(line["started"] for line in lines))[-runs:]
    return [line for line in lines if line["started"] in started]


def cell(values, form):
    """The median and, in brackets, the quartiles: of less than four values, the smallest and largest."""
    low, _, high = quantiles(values, n=4) if len(values) > 3 else (min(values), None, max(values))
    return f"{median(values):{form}} ({low:{form}} to {high:{form}})"


def add_program(parser):
    """The `paceline` to measure, as the last argument."""
    parser.add_argument("program", nargs="?", default=str(ROOT / "target/release/paceline"))


def check_program(parser, program):
    if not os.access(program, os.X_OK):
        parser.error(f"there is no program {program}")


class Results:
    """The lines of this run. Each is appended to the file at once."""

    def __init__(self, out, program):
        self.out, self.lines = out, []
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        self.add(record="setup", commit=commit.stdout.strip(), program=Path(program).parent.name,
                 machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}", load=os.getloadavg()[0])

    def add(self, **line):
        self.lines.append({"started": self.started, **line})
        with open(self.out, "a", encoding="utf-8") as out:
            print(json.dumps(self.lines[-1]), file=out)

    def end(self):
        self.add(record="end", load=os.getloadavg()[0])
        return self.lines
