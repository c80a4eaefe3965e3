#!/usr/bin/env python3
"""Makes the pictures of docs/pictures again: real jobs on the built-in digits, as a terminal and a browser show them.

Usage: tools/pictures.py [--program PROGRAM] [NAME...]

NAME is that of a picture, such as bar.svg; by default all are made. PROGRAM is by default target/release/paceline. Needs pyte and Pillow (from PyPI),
a headless Chromium, and a font with Korean letters (fonts-nanum). Look at the pictures before you commit them.

Exit codes: 0 done, 1 something failed, 2 wrong usage."""

import argparse
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from html import escape
from pathlib import Path
from urllib.request import urlopen

import pyte
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/pictures"
BROWSERS = ["chromium-headless-shell", "chromium", "google-chrome"]
# Pixels of a character cell, and around all of them.
CELL, LINE, EDGE = 8.4, 18, 12
COLOURS = {"default": "#c8ccd4", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2",
           "black": "#5c6370", "brightblack": "#7f848e", "white": "#ffffff"}  # fmt: skip
BACKGROUND = "#14191f"
SECONDS_MAX = 300
TRAIN = ["train", "--nproc-per-node", "2", "--shards", "8"]
DESK, PHONE = 1000, 390


class Terminal:
    """A program in a terminal of so many columns and lines."""

    def __init__(self, command, folder, size):
        self.screen = pyte.Screen(*size)
        self.stream = pyte.ByteStream(self.screen)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            os.execvp(command[0], command)
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def look(self, seconds, until=lambda text: False):
        """Reads what the program shows for so long, or until its text is as wanted; whether it is. A program that has ended shows no more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.02)[0]:
                try:
                    self.stream.feed(os.read(self.fd, 1 << 16))
                except OSError:
                    return False
            if until("\n".join("".join(cell.data for cell in row) for row in self.rows())):
                return True
        return False

    def rows(self):
        columns, lines = range(self.screen.columns), range(self.screen.lines)
        return [[self.screen.buffer[line][column] for column in columns] for line in lines]

    def close(self, keys=b""):
        if keys:
            os.write(self.fd, keys)
        self.look(SECONDS_MAX if not keys else 5)
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)

    def svg(self, prompt=None):
        """The screen up to its last line that is not empty, below a command."""
        rows = self.rows()
        while rows and all(cell.data in ("", " ") for cell in rows[-1]):
            rows.pop()
        if prompt:
            cells = pyte.Screen(len(prompt) + 2, 1)
            pyte.Stream(cells).feed(f"$ {prompt}")
            rows.insert(0, [cells.buffer[0][column] for column in range(len(prompt) + 2)])
        width = round(2 * EDGE + max(map(len, rows)) * CELL)
        height = 2 * EDGE + len(rows) * LINE
        parts = [
            f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" """
            f"""font-family="'DejaVu Sans Mono',Menlo,Consolas,'NanumGothicCoding','Noto Sans Mono CJK KR',monospace" font-size="14">"""
            f"""<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>"""
        ]
        for line, row in enumerate(rows):
            parts += self.words(row, EDGE + line * LINE)
        return "\n".join([*parts, "</svg>", ""])

    def words(self, row, top):
        style = lambda cell: (cell.fg, cell.bg, cell.bold, cell.reverse)
        start = 0
        while start < len(row):
            end = start + 1
            while end < len(row) and style(row[end]) == style(row[start]) and (row[end].data == " ") == (row[start].data == " "):
                end += 1
            cell, text = row[start], "".join(cell.data for cell in row[start:end])
            front, back = COLOURS.get(cell.fg, f"#{cell.fg}"), COLOURS.get(cell.bg, f"#{cell.bg}") if cell.bg != "default" else BACKGROUND
            if cell.reverse:
                front, back = back, front
            left, length = EDGE + start * CELL, (end - start) * CELL
            if back != BACKGROUND:
                yield f'<rect x="{left:.1f}" y="{top}" width="{length:.1f}" height="{LINE}" fill="{back}"/>'
            if text.strip():
                bold = ' font-weight="bold"' if cell.bold else ""
                place = f'x="{left:.1f}" y="{top + 13.5}" fill="{front}"{bold} textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
                yield f"<text {place}>{escape(text)}</text>"
            start = end


class Maker:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, *words, **more):
        return subprocess.run([self.program, *words], cwd=self.folder, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS_MAX, **more)

    def trained(self, name, *words):
        """A run of this name, trained once."""
        if not (self.folder / "runs" / name).exists():
            self.run(*TRAIN, "--run-dir", f"runs/{name}", *words)
        return f"runs/{name}"

    def disturbed(self):
        """A run that loses rank 1 and goes on with another one in its place."""
        name = "runs/disturbed"
        if not (self.folder / name).exists():
            command = [self.program, *TRAIN, "--epochs", "30", "--recovery", "live", "--max-restarts", "1"]
            job = subprocess.Popen([*command, "--run-dir", name], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda: b'"epoch":8' in read(self.folder / name / "metrics.jsonl"))
            ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
            os.kill(int(ranks[1]), signal.SIGKILL)
            if job.wait(SECONDS_MAX):
                sys.exit("the disturbed job failed")
        return name

    def bar(self):
        words = [*TRAIN, "--epochs", "40"]
        terminal = Terminal([self.program, *words, "--run-dir", "bar"], self.folder, (110, 20))
        # The bar knows when all ranks were busy from the first epoch on.
        if not terminal.look(60, lambda text: re.search(r"epoch +5/40", text) and "busy" in text):
            sys.exit("no bar was seen")
        svg = terminal.svg(" ".join(["paceline", *words]))
        terminal.close()
        return svg

    def watch(self, lang):
        self.trained("first")
        command = [self.program, *TRAIN, "--epochs", "400", "--lr", "0.01", "--run-dir", f"{lang}/second"]
        job = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        metrics = self.folder / f"{lang}/second/metrics.jsonl"
        wait_for(lambda: b'"epoch":9' in read(metrics))
        terminal = Terminal([self.program, "watch", "runs/first", f"{lang}/second", "--lang", lang], self.folder, (100, 32))
        terminal.look(3)
        svg = terminal.svg()
        terminal.close(b"q")
        job.terminate()
        job.wait(SECONDS_MAX)
        return svg

    def report(self, runs, lang, width, height, sections=None):
        page = self.folder / "page.html"
        self.run("report", *runs, "--lang", lang, "--output", page)
        if sections:
            kept = "".join(f":not(#{section})" for section in sections)
            page.write_text(page.read_text().replace("</style>", f"section{kept}, h1 {{ display: none; }}\n</style>", 1))
        return screenshot(page.as_uri(), width, height)

    def serve(self, lang):
        self.trained("first"), self.trained("second", "--lr", "0.01")
        server = subprocess.Popen([self.program, "serve", "runs", "--listen", "127.0.0.1:6511", "--lang", lang], cwd=self.folder, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: urlopen("http://127.0.0.1:6511").status == 200)
            return screenshot("http://127.0.0.1:6511", DESK, 330)
        finally:
            server.terminate()
            server.wait()


def read(path):
    return path.read_bytes() if path.exists() else b""


def wait_for(is_so):
    for _ in range(SECONDS_MAX * 10):
        try:
            if is_so():
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("waited in vain")


def screenshot(url, width, height):
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        for browser in BROWSERS:
            try:
                words = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}", f"--screenshot={picture}", url]
                subprocess.run([browser, *words], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=SECONDS_MAX)
                # Few colours take a third of the bytes.
                Image.open(picture).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)
                return picture.read_bytes()
            except FileNotFoundError:
                continue
    sys.exit(f"none of these is there: {', '.join(BROWSERS)}")


PICTURES = {
    "bar.svg": lambda make: make.bar(),
    "watch.svg": lambda make: make.watch("en"),
    "watch.ko.svg": lambda make: make.watch("ko"),
    "report.png": lambda make: make.report([make.trained("first")], "en", DESK, 1250),
    "report.ko.png": lambda make: make.report([make.trained("first")], "ko", DESK, 1250),
    "report-phone.png": lambda make: make.report([make.trained("first")], "en", PHONE, 1250),
    "report-phone.ko.png": lambda make: make.report([make.trained("first")], "ko", PHONE, 1250),
    "report-two.png": lambda make: make.report([make.trained("first"), make.trained("second", "--lr", "0.01")], "en", DESK, 900),
    "report-ranks.png": lambda make: make.report([make.disturbed()], "en", DESK, 900, ["ranks", "steps", "incidents"]),
    "serve.png": lambda make: make.serve("en"),
    "serve.ko.png": lambda make: make.serve("ko"),
}


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1].split("\n\n")[0])
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/paceline")
    parser.add_argument("name", nargs="*", default=list(PICTURES))
    options = parser.parse_args()
    unknown = [name for name in options.name if name not in PICTURES]
    if unknown or not options.program.is_file():
        parser.error(f"no picture {unknown[0]}" if unknown else f"no program {options.program}")
    with tempfile.TemporaryDirectory() as folder:
        make = Maker(options.program.resolve(), Path(folder))
        for name in options.name:
            print(name, file=sys.stderr)
            picture = PICTURES[name](make)
            (OUT / name).write_bytes(picture if isinstance(picture, bytes) else picture.encode())


if __name__ == "__main__":
    main()
