#!/usr/bin/env python3
"""Writes the handwritten digits that are built into Paceline in the other formats that `paceline train` reads.

Usage: python3 examples/digits.py FOLDER

FOLDER gets `digits.csv`, `digits.tsv`, `digits.jsonl`, `png/train` and `png/val` with a folder for each digit, and `idx` with the four files of
MNIST. With `pyarrow` installed it gets `digits.parquet` too; nothing else is needed. The last fifth of the images is `val` and `t10k`.
"""

import gzip
import json
import pathlib
import struct
import sys
import zlib

SIDE = 8
SOURCE = pathlib.Path(__file__).parent.parent / "crates/train/data/digits.csv.gz"


def png(pixels):
    """A grey image of SIDE x SIDE pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # A row begins with its filter: none.
    rows = b"".join(b"\0" + pixels[at : at + SIDE] for at in range(0, len(pixels), SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_table(folder, rows):
    """The rows as CSV, TSV, JSON lines and, if it can be written, Parquet."""
    names = [f"p{at}" for at in range(SIDE * SIDE)] + ["label"]
    for ending, separator in [("csv", ","), ("tsv", "\t")]:
        lines = [names, *rows]
        text = "".join(separator.join(map(str, line)) + "\n" for line in lines)
        (folder / f"digits.{ending}").write_text(text)
    text = "".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows)
    (folder / "digits.jsonl").write_text(text)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        print("no digits.parquet: pyarrow is not installed")
        return
    columns = dict(zip(names, zip(*rows)))
    pyarrow.parquet.write_table(pyarrow.table({name: list(column) for name, column in columns.items()}), folder / "digits.parquet")


def write_images(folder, rows):
    """The rows as PNG files and as IDX files, with intensities from 0 to 255."""
    held_out = len(rows) // 5
    for is_trained, part in [(True, rows[:-held_out]), (False, rows[-held_out:])]:
        images = [bytes(min(255, 16 * value) for value in row[:-1]) for row in part]
        for number, (image, row) in enumerate(zip(images, part)):
            path = folder / "png" / ("train" if is_trained else "val") / str(row[-1]) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(image))
        name = "train" if is_trained else "t10k"
        idx = folder / "idx"
        idx.mkdir(exist_ok=True)
        header = struct.pack(">IIII", 0x803, len(part), SIDE, SIDE)
        (idx / f"{name}-images-idx3-ubyte").write_bytes(header + b"".join(images))
        labels = bytes(row[-1] for row in part)
        (idx / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(part)) + labels)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.split("\n\n")[1])
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(SOURCE, "rt") as lines:
        rows = [[int(cell) for cell in line.split(",")] for line in lines]
    write_table(folder, rows)
    write_images(folder, rows)
    print(f"{folder}: {len(rows)} digits in each format")


main()
