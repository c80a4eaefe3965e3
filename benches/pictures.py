#!/usr/bin/env python3
"""Draws what the CPU kernels reach, where the time of a step goes, and how costs grow with the ranks, as SVG.

Usage: benches/pictures.py roofline [KERNELS] >roofline.svg
       benches/pictures.py profile [--before PROGRAM] [--seconds N] WORKLOAD... >profile.svg
       benches/pictures.py worlds >worlds.svg

`roofline` reads the first instruction set of the first run in KERNELS, the output of `cargo bench -p paceline-kernels` (docs/benchmarks/kernels.txt): each layer's GFLOP/s over
its operations for each byte, below what registers and memory allow. `profile` samples steps of `examples/step_time` on one thread with perf and
sorts the samples by kernel; PROGRAM is an earlier build of it. Functions must keep their names:
`cargo rustc --release -p paceline --example step_time -- -C strip=none`. `worlds` draws docs/benchmarks/worlds.jsonl, the results of benches/worlds.py.
"""

import argparse
import html
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from statistics import median

from results import path
from step_time import KEPT, PROGRAM
from worlds import kept

WIDTH, INK, PALE, LINE = 960, "#1f2933", "#667381", "#d9dfe5"
COLOURS = ["#2f6fb3", "#6aa0d8", "#a9c8e8", "#c8553d", "#e39b7b", "#4f9d69", "#9ccb8f", "#8a63b5", "#c3a6e0", "#d9a404", "#7b8794", "#c3ccd5"]


def text(x, y, words, size=12, anchor="start", fill=INK, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{more}>{html.escape(words)}</text>'


def line(x1, y1, x2, y2, stroke=LINE, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{more}/>'


def rect(x, y, width, height, fill, words=""):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"><title>{html.escape(words)}</title></rect>'


def picture(title, subtitle, height, parts):
    """On white, so that it can be read in the dark too."""
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title" '
          "font-family=\"'Noto Sans','DejaVu Sans',sans-serif\">")
    print(f'<title id="title">{html.escape(title)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>')
    print(text(64, 36, title, 20, more=' font-weight="600"'), text(64, 58, subtitle, 13, fill=PALE), *parts, "</svg>", sep="\n")


def layers(lines):
    """Of each row of a table with FLOP/byte: its kind, its name, and pairs of FLOP/byte and GFLOP/s; and all rates of registers."""
    found, peaks, head = [], [], []
    for row in lines:
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        if "FLOP/byte" in cells:
            head = cells
        elif not row.startswith("|"):
            head = []
        elif head and not cells[0].startswith("---"):
            points, intensity = [], None
            for name, cell in list(zip(head, cells))[1:-1]:
                if name == "FLOP/byte":
                    intensity = float(cell)
                else:
                    points.append((intensity, float(cell.split()[0])))
            found.append((head[0], cells[0], points))
            peaks.append(float(cells[-1]))
    return found, peaks


def below(values):
    return 2.0 ** math.floor(math.log2(min(values)))


def above(values):
    return 2.0 ** math.ceil(math.log2(max(values)))


def doublings(least, most):
    return [least * 2**times for times in range(round(math.log2(most / least)) + 1)]


def roofline(options):
    run = re.split(r"^(?:avx2|Earlier)", options.kernels.read(), maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    found, peaks = layers(run)
    title = next(row for row in run if "one thread" in row)
    peak = median(peaks)
    memory = next(float(row.split()[1]) for row in run if row.startswith("memory: "))
    left, right, top, bottom = 64, 640, 84, 560
    all_points = [point for *_, points in found for point in points]
    # Powers of two around all points, and some of the slope.
    least, most = below([intensity for intensity, _ in all_points]) / 4, above([intensity for intensity, _ in all_points])
    lowest, highest = below([rate for _, rate in all_points]), above([peak, *(rate for _, rate in all_points)])
    x = lambda intensity: left + (right - left) * math.log(intensity / least) / math.log(most / least)
    y = lambda rate: bottom - (bottom - top) * math.log(rate / lowest) / math.log(highest / lowest)
    parts = []
    for power in doublings(least, most):
        parts += [line(x(power), top, x(power), bottom), text(x(power), bottom + 18, f"{power:g}", fill=PALE, anchor="middle")]
    for power in doublings(lowest, highest):
        parts += [line(left, y(power), right, y(power)), text(left - 6, y(power) + 4, f"{power:g}", fill=PALE, anchor="end")]
    parts.append(text((left + right) / 2, bottom + 38, "operations for each byte of a layer's tensors", anchor="middle", fill=PALE))
    for share, more in ((1, ' stroke-width="2"'), (0.8, ' stroke-dasharray="6 4"'), (0.6, ' stroke-dasharray="2 4"')):
        ridge = max(share * peak / memory, least)
        parts.append(line(x(ridge), y(share * peak), right, y(share * peak), INK, more))
        parts.append(text(right - 6, y(share * peak) - 5, f"{share:.0%}: {share * peak:.0f} GFLOP/s", 11, "end"))
    start = max(least, lowest / memory)
    parts.append(line(x(start), y(start * memory), x(peak / memory), y(peak), INK, ' stroke-width="2"'))
    parts.append(text(x(start) + 8, y(start * memory) + 14, f"memory: {memory:.0f} GB/s", 11))
    labels = []
    colours = dict(zip(dict.fromkeys(kind for kind, *_ in found), (COLOURS[0], COLOURS[3], COLOURS[5])))
    for number, (kind, name, points) in enumerate(found, 1):
        colour = colours[kind]
        parts += [line(x(a[0]), y(a[1]), x(b[0]), y(b[1]), colour, ' stroke-opacity="0.5"') for a, b in zip(points, points[1:])]
        for (intensity, rate), side in zip(points, (5, 3.5, 2)):
            parts.append(f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="{side}" fill="{colour}"><title>{html.escape(name)}: {rate} GFLOP/s</title></circle>')
        intensity, rate = min(points, key=lambda point: point[1])
        label = [x(intensity), y(rate) + 15]
        while any(abs(label[0] - across) < 12 and abs(label[1] - down) < 10 for across, down in labels):
            label[1] += 3
        labels.append(label)
        parts.append(text(*label, str(number), 10, "middle", colour))
        shares = ", ".join(f"{rate / peak:.0%}" for _, rate in points)
        parts.append(text(right + 20, top + 8 + 20 * (number - 1), f"{number}  {name}: {shares}", 11, fill=colour))
    end = max(bottom + 62, top + 28 + 20 * len(found))
    parts.append(text(64, end, "100% are multiply-adds on registers. Large dot: output; middle: gradient of the input, or all of attention's; small: of the weight.", fill=PALE))
    parts.append(text(64, end + 18, "Operations are those of the plain sums. Convolutions of 3x3 with a stride of 1 need 2.25 times fewer multiplications.", fill=PALE))
    picture("Speed of the CPU kernels beside the processor's", title, end + 36, parts)


# What a sample belongs to: the first kind that one of its functions names.
KINDS = [
    ("convolution: output", r"Kernels>::conv$"),
    ("its input's gradient", r"::conv_input_gradient"),
    ("its weight's gradient", r"::(conv_)?(weight|bias)_gradient"),
    ("products", r"Kernels>::gemm|::gemm::"),
    ("attention", r"paceline_kernels::attention::"),
    ("norms", r"::batch_norm|::layer_norm"),
    ("relu, gelu", r"Kernels>::(relu|gelu)|::activations::"),
    ("loss", r"cross_entropy|::softmax::"),
    ("AdamW", r"adamw|AdamW"),
]
SYSTEM, BURN, REST = "system (page faults)", "Burn's operations", "rest"
ORDER = [*(kind for kind, _ in KINDS), BURN, SYSTEM, REST]
# From specific to general, because one kernel may use another.
BY_WEIGHT = sorted(KINDS, key=lambda kind: kind[0] == "convolution: output")


def kind_of(frames):
    if "kernel.kallsyms" in frames[0]:
        return SYSTEM
    # An address, a name, and a file in brackets; before that, the name's hash.
    names = [re.sub(r"(::h[0-9a-f]{16})? \([^()]*\)$", "", frame.split(None, 1)[1]) for frame in frames]
    for kind, pattern in BY_WEIGHT:
        if any(re.search(pattern, name) for name in names):
            return kind
    ours = (name for name in names if "burn_" in name or "paceline_" in name)
    return BURN if "burn_" in next(ours, "") else REST


def sample(program, workload, seconds):
    """Milliseconds of each kind in a step, and its page faults."""
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "perf.data")
        step = [program, "--workload", workload, "--steps", "15", "--warmup", "3", "--seconds", str(seconds)]
        record = ["perf", "record", "-q", "-F", "397", "--call-graph", "dwarf,16384", "-o", data, "--", *step]
        done = subprocess.run(record, env={**os.environ, **KEPT, "RAYON_NUM_THREADS": "1"}, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        script = ["perf", "script", "-i", data, "--no-inline", "-F", "time,ip,sym,dso"]
        blocks = subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip().split("\n\n")
    samples = [(float(head.strip().rstrip(":")), frames) for head, *frames in (block.splitlines() for block in blocks) if frames]
    # The steps at the end run without a pause.
    start = samples[-1][0] - 0.97 * result["steps"] * result["streamed_seconds"]
    kinds = Counter(kind_of(frames) for time, frames in samples if time > start)
    return {kind: 1e3 * result["streamed_seconds"] * count / kinds.total() for kind, count in kinds.items()}, result.get("page_faults")


def profile(options):
    programs = {"before": options.before} if options.before else {}
    programs["now"] = str(PROGRAM)
    left, right, y, parts = 144, 800, 104, []
    for workload in options.workloads:
        bars = {label: sample(program, workload, options.seconds) for label, program in programs.items()}
        print(workload, json.dumps(bars), file=sys.stderr)
        longest = max(sum(kinds.values()) for kinds, _ in bars.values())
        for label, (kinds, faults) in bars.items():
            x = left
            parts.append(text(left - 10, y + 19, f"{workload}, {label}" if len(bars) > 1 else workload, 13, "end"))
            for kind in ORDER:
                width = (right - left) * kinds.get(kind, 0) / longest
                share = kinds.get(kind, 0) / sum(kinds.values())
                parts.append(rect(x, y, width, 28, COLOURS[ORDER.index(kind)], f"{kind}: {kinds.get(kind, 0):.1f} ms"))
                if width > 30:
                    parts.append(text(x + width / 2, y + 18, f"{share:.0%}", 11, "middle", "#ffffff" if ORDER.index(kind) in (0, 3, 5, 7, 10) else INK))
                x += width
            parts.append(text(x + 8, y + 12, f"{sum(kinds.values()):.1f} ms"))
            if faults is not None:
                parts.append(text(x + 8, y + 27, f"{faults:.0f} page faults", 11, fill=PALE))
            y += 38
        y += 12
    for at, kind in enumerate(ORDER):
        across, down = left + at % 4 * 190, y + 8 + at // 4 * 22
        parts += [rect(across, down, 14, 14, COLOURS[at]), text(across + 20, down + 12, kind)]
    picture("Where the time of a training step goes", "One thread; bars of one network share a scale", y + 90, parts)


# Of a job of benches/worlds.py: what is drawn, and how it is computed.
GROWTH = [
    ("time to join", lambda line: line["join_seconds"]),
    ("median step", lambda line: line["step_seconds"]),
    ("memory of a rank (PSS)", lambda line: line["pss_bytes"]),
    ("processor time of a rank", lambda line: line["ranks_seconds"] / line["world"]),
    ("processor time of the launcher", lambda line: line["launcher_seconds"]),
    ("open files of a rank", lambda line: line["files"]),
]


def worlds(_):
    jobs = [line for line in kept() if line["record"] == "job" and line["code"] == 0]
    parts, height, width = [], 360, 380
    for panel, transport in enumerate(dict.fromkeys(line["transport"] for line in jobs)):
        lines = sorted((line for line in jobs if line["transport"] == transport), key=lambda line: line["world"])
        base = lines[0]
        left, top, bottom = 100 + panel * (width + 60), 110, 110 + height
        least, most = base["world"], max(line["world"] for line in jobs)
        x = lambda world: left + width * math.log(world / least) / math.log(most / least)
        factors = [of(line) / of(base) for _, of in GROWTH for line in lines if of(base)]
        lowest, highest = min(0.5, *factors), max(*factors, most / least)
        y = lambda factor: bottom - height * math.log(factor / lowest) / math.log(highest / lowest)
        parts.append(text(left, top - 14, f"over {transport}", 13))
        for line_of in lines:
            parts += [line(x(line_of["world"]), top, x(line_of["world"]), bottom), text(x(line_of["world"]), bottom + 18, str(line_of["world"]), 11, "middle", PALE)]
        for power in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1):
            parts += [line(left, y(10 ** power), left + width, y(10 ** power)), text(left - 6, y(10 ** power) + 4, f"{10 ** power:g}", 11, "end", PALE)]
        last = lines[-1]["world"]
        parts.append(line(x(least), y(1), x(last), y(last / least), INK, ' stroke-dasharray="6 4"'))
        for colour, (name, of) in zip((COLOURS[place] for place in (0, 3, 5, 7, 9, 10)), GROWTH):
            if not of(base):
                continue
            points = [(x(line["world"]), y(of(line) / of(base)), of(line) / of(base)) for line in lines]
            parts += [line(*a[:2], *b[:2], colour, ' stroke-width="2"') for a, b in zip(points, points[1:])]
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"><title>{name}: {factor:.1f} times</title></circle>' for a, b, factor in points]
    for place, (colour, (name, _)) in enumerate(zip((COLOURS[number] for number in (0, 3, 5, 7, 9, 10)), GROWTH)):
        across, down = 100 + place % 3 * 270, 110 + height + 44 + place // 3 * 22
        parts += [rect(across, down, 14, 14, colour), text(across + 20, down + 12, name)]
    title = "How the costs of a job grow with its ranks"
    picture(title, "Times as much as with 8 ranks, all on one machine with 2 cores; dashed: as much more as there are ranks more", 110 + height + 100, parts)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    of_roofline = commands.add_parser("roofline")
    of_roofline.add_argument("kernels", nargs="?", type=argparse.FileType(), default=str(path("kernels.txt")))
    of_roofline.set_defaults(run=roofline)
    commands.add_parser("worlds").set_defaults(run=worlds)
    of_profile = commands.add_parser("profile")
    of_profile.add_argument("--before")
    of_profile.add_argument("--seconds", type=int, default=5)
    of_profile.add_argument("workloads", nargs="+")
    of_profile.set_defaults(run=profile)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
