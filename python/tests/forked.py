"""Ranks as forked processes, and cases one after another, for the other files here and `benches/torch_same_bits.py`."""

import faulthandler
import multiprocessing
import socket
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(world, function, *args, backend="paceline", limit_s=600):
    """What a function returns on each of so many ranks; without a group if it is one."""
    port = free_port()
    results = FORK.SimpleQueue()

    def run(rank):
        faulthandler.dump_traceback_later(limit_s, exit=True)
        torch.set_num_threads(1)
        if world > 1:
            address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=limit)
        results.put((rank, function(*args)))
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
    return [result for _, result in sorted((results.get() for _ in range(world)), key=lambda pair: pair[0])]


def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("it did not fail")


def main(*tests):
    """Runs the functions whose names are asked for, and says how each ended."""
    torch.set_num_threads(1)
    run_named([(test.__name__, test) for test in tests])


def run_named(tests):
    """The same of names and functions."""
    wanted, failures = sys.argv[1:], 0
    for name, test in tests:
        if wanted and not any(word in name for word in wanted):
            continue
        started = time.monotonic()
        try:
            test()
            outcome = "ok"
        except Exception:
            traceback.print_exc()
            outcome, failures = "FAILED", failures + 1
        print(f"{name} ... {outcome} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(min(failures, 1))
