#!/usr/bin/env python3
"""Runs PyTorch's own tests of torch.distributed on Gloo and on the backend `paceline`, and says why their outcomes differ.

Usage: benches/torch_tests.py [--ranks LIST] [--only REGEX] [--limit SECONDS] [--python PYTHON] [--library FILE] [--table]

Appends to docs/benchmarks/torch_tests.jsonl and prints two tables: how many tests pass, fail and are skipped, and each test whose outcome
differs, with the reason, from REASONS here. `--table` prints those of the newest run again; the exit code is 1 if a reason is missing.
The tests are `torch.testing._internal.distributed.distributed_test` of the installed PyTorch, those on CPUs. Each rank is a forked process.
Build first: `cargo build --release -p paceline-python`. CARGO_TARGET_DIR is heeded.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from results import newest, path
from torch_backend import arguments, measurements, package

OUT = path("torch_tests.jsonl")
BACKENDS = ("gloo", "paceline")
MODULE = "torch.testing._internal.distributed.distributed_test"

# The tests ask for backends by name. Those that ask for Gloo run on ours too, and those that ask for MPI, which PyTorch's wheels lack, on both.
GATES = (
    (r'@skip_but_pass_in_sandcastle_if\(\s*BACKEND != "mpi", "[^"]*"\s*\)', "@_for_mpi"),
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "paceline")'),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "paceline")'),
    (r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"gloo", "paceline"})'),
)

# Why outcomes differ: what a test's name begins with, which backend does worse, and the reason.
REASONS = (
    ("test_all_to_all", "gloo", "Gloo's `all_to_all` wants tensors of one size; PyTorch runs this test with MPI only"),
)


def load():
    """The module of the tests, with its gates open."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("gpu", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("paceline")
    spec = importlib.util.find_spec(MODULE)
    source = Path(spec.origin).read_text(encoding="utf-8")
    for gate, opened in GATES:
        source, found = re.subn(gate, opened, source)
        assert found, f"this PyTorch has no gate {gate}"

    def for_mpi(test):
        test.for_mpi = True
        return test

    module = types.ModuleType(MODULE)
    module.__file__, module._for_mpi = spec.origin, for_mpi
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def needs_gpu(test):
    """A decorator asks for GPUs. They skip only after the ranks have met, which takes a second for each test."""
    while test is not None:
        if test.__code__.co_filename.endswith("common_distributed.py") and "gpu" in test.__code__.co_qualname:
            return True
        test = getattr(test, "__wrapped__", None)
    return False


def why(error):
    """The line of a report that says what was wrong."""
    lines = [line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b", line) and "exited with" not in line]
    return (lines or error.strip().splitlines()[-1:])[0][:300]


def host(only, limit):
    """Runs the tests with the backend and the number of ranks that the environment names, and prints a line for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import unittest

    import torch
    import torch._dynamo  # once, before the ranks are forked
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    module = load()
    common_distributed.TIMEOUT_DEFAULT = limit
    common_distributed.TIMEOUT_OVERRIDE.clear()

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    for name in sorted(name for name in dir(Tests) if name.startswith("test_") and re.search(only, name)):
        test = getattr(Tests, name)
        if needs_gpu(test):
            continue
        result, begun = unittest.TestResult(), time.monotonic()
        Tests.setUpClass()
        Tests(name).run(result)
        print(*(text for _, text in result.errors + result.failures), sep="\n", file=sys.stderr)
        if result.skipped:
            outcome, reason = "skipped", result.skipped[0][1]
        elif result.errors or result.failures:
            outcome, reason = "failed", why((result.errors + result.failures)[0][1])
        else:
            outcome, reason = "passed", None
        seconds = round(time.monotonic() - begun, 1)
        print(json.dumps({"test": name, "for_mpi": hasattr(test, "for_mpi"), "outcome": outcome, "why": reason, "seconds": seconds}), file=out, flush=True)


def run(backend, world, options, folder):
    """Yields what the host of a backend prints."""
    env = {**os.environ, "BACKEND": backend, "WORLD_SIZE": str(world), "PYTHONPATH": f"{folder}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    command = [options.python, __file__, "--host", options.only, str(options.limit)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=options.log, text=True) as process:
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"the tests with {backend} and {world} ranks ended with code {process.returncode}; {options.log.name} says why")


def table(lines):
    """Prints both tables; whether every difference has its reason."""
    tests = [line for line in lines if line["record"] == "test"]
    version = next(line["version"] for line in lines if line["record"] == "torch")
    print(f"{lines[0]['machine']}, PyTorch {version}, commit {lines[0]['commit']}\n")
    print("| ranks | tests | | passed | failed | skipped |\n|---|---|---|---|---|---|")
    for ranks in sorted({test["ranks"] for test in tests}):
        for for_mpi, words in ((False, "of Gloo"), (True, "of MPI, opened")):
            for backend in BACKENDS:
                kind = [test for test in tests if (test["ranks"], test["for_mpi"], test["backend"]) == (ranks, for_mpi, backend)]
                counts = Counter(test["outcome"] for test in kind)
                print(f"| {ranks} | {words} | {backend} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    by_name = {}
    for test in tests:
        by_name.setdefault(test["test"], {}).setdefault(test["ranks"], {})[test["backend"]] = test
    print("\n| test | ranks | Gloo | Paceline | reason |\n|---|---|---|---|---|")
    explained = True
    for name, by_ranks in by_name.items():
        differing = {}
        for ranks, pair in by_ranks.items():
            outcomes = tuple(pair[backend]["outcome"] if backend in pair else "not run" for backend in BACKENDS)
            if len(set(outcomes)) > 1:
                differing.setdefault(outcomes, []).append(str(ranks))
        for outcomes, ranks in differing.items():
            worse = "gloo" if outcomes[1] == "passed" else "paceline"
            reason = next((words for begin, backend, words in REASONS if name.startswith(begin) and backend == worse), None)
            explained &= reason is not None
            print(f"| `{name}` | {', '.join(ranks)} | {' | '.join(outcomes)} | {reason or 'unexplained'} |")
    return explained


def main():
    parser = arguments(__doc__, OUT)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=int, default=60, help="seconds for each test")
    options = parser.parse_args()
    if options.table:
        sys.exit(not table(newest(options.out, options.table)))
    lines = measurements(options)
    version = subprocess.run([options.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True)
    lines.add(record="torch", version=version.stdout.strip())
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", prefix="torch_tests", suffix=".log", delete=False) as options.log:
        package(Path(folder), options.library.resolve())
        for world in map(int, options.ranks.split(",")):
            # Most of a test is waiting, so both backends run at a time.
            def all_tests(backend, world=world, folder=folder):
                for test in run(backend, world, options, folder):
                    lines.add(record="test", ranks=world, backend=backend, **test)

            with ThreadPoolExecutor() as pool:
                list(pool.map(all_tests, BACKENDS))
    sys.exit(not table(lines.end()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        host(sys.argv[2], int(sys.argv[3]))
    else:
        main()
