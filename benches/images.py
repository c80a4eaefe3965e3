#!/usr/bin/env python3
"""Times the loading of an image folder, beside torchvision and PyTorch's DataLoader with as many workers, in alternating rounds.

Usage: benches/images.py --python PYTHON [--rounds N] [--images N] [--folder DIR] [--table]

Appends to docs/benchmarks/images.jsonl and prints a table of medians with quartiles. The images are JPEG of 500 x 375 pixels, the usual size in ImageNet, and PNG of
32 x 32, as CIFAR has them: made of noise by Pillow (N of each, 1,000), or one folder of yours for both. They are cropped at random to 224 and 32 pixels, flipped and normalised.
PYTHON is one that has torchvision. Build first: `cargo bench -p paceline-train --bench images --no-run`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from results import ROOT, Results, cell, newest, path

OUT = path("images.jsonl")
PEER = ROOT / "benches/peers/images.py"
BATCH = 64
WORKERS = [1, 2]
# Noise of a coarse and of a fine grain: about as many bytes as a photograph.
MAKE = """
import random, sys
from pathlib import Path
from PIL import Image
folder, count, width, height, ending = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
draws = random.Random(0)
noise = lambda w, h: Image.frombytes("RGB", (w, h), draws.randbytes(3 * w * h))
for number in range(count):
    coarse = noise(8, 6).resize((width, height), Image.BICUBIC)
    image = Image.blend(coarse, noise(width, height), 0.08)
    path = Path(folder) / str(number % 10) / f"{number}.{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **({"quality": 85} if ending == "jpg" else {}))
"""
KINDS = {"JPEG of 500 x 375 to 224 pixels": (500, 375, "jpg", 224), "PNG of 32 x 32 pixels": (32, 32, "png", 32)}


def run(words):
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed: {done.stderr}")
    return done.stdout


def table(lines):
    setup = lines[0]
    print(f"\n{setup['machine']}, commit {setup['commit']}; samples/s: median (quartiles); memory: peak\n")
    print("| images | workers | Paceline | torchvision | Paceline by torchvision | Paceline, MiB | torchvision, MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    rows = {}
    for line in lines:
        if line["record"] == "epoch":
            rows.setdefault((line["images"], line["workers"]), {}).setdefault(line["library"], []).append(line)
    for (images, workers), by in rows.items():
        speeds = {library: [line["samples_per_second"] for line in found] for library, found in by.items()}
        ratios = [ours / theirs for ours, theirs in zip(speeds["paceline"], speeds["torchvision"])]
        cells = [cell(speeds[library], ",.0f") for library in ("paceline", "torchvision")]
        peaks = [f"{max(line['peak_mib'] for line in by[library]):,.0f}" for library in ("paceline", "torchvision")]
        print(f"| {images} | {workers} | {' | '.join([*cells, cell(ratios, '.2f'), *peaks])} |")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--folder")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(newest(OUT))
    if not options.python or not os.access(options.python, os.X_OK):
        parser.error(f"there is no program {options.python}")
    ours = ["cargo", "bench", "--quiet", "-p", "paceline-train", "--bench", "images", "--"]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for kind, (width, height, ending, _) in KINDS.items():
            folders[kind] = Path(options.folder or Path(scratch) / ending)
            if not options.folder:
                run([options.python, "-c", MAKE, *map(str, (folders[kind], options.images, width, height, ending))])
        results = Results(OUT, ROOT / "target/release/images")
        for number in range(options.rounds):
            for kind, (*_, side) in KINDS.items():
                for workers in WORKERS:
                    for library, words in (("paceline", ours), ("torchvision", [options.python, PEER])):
                        found = json.loads(run([*words, *map(str, (folders[kind], side, BATCH, workers))]).splitlines()[-1])
                        print(f"round {number + 1}: {kind}, {workers} workers, {library}: {found['samples_per_second']:,.0f} samples/s", file=sys.stderr)
                        results.add(record="epoch", round=number, images=kind, workers=workers, library=library, **found)
        table(results.end())


if __name__ == "__main__":
    main()
