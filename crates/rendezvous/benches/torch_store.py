"""The peer of `store.rs`: the same JSON lines for torch's TCPStore (libuv), server and client in separate processes.

    cargo bench -p paceline-rendezvous --bench store
    python crates/rendezvous/benches/torch_store.py [--clients 10000] [--idle 1000] [--seconds 1] [--no-join]

torch's `set` is not confirmed by its server: it only fills a socket's buffer. `set_confirmed` therefore adds a `check`
after each `set`, the shortest operation with an answer; compare that one with Paceline's `set`, which is confirmed.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def serve():
    """Hosts a store until standard input ends."""
    raise_descriptors()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    print(store.port, flush=True)
    sys.stdin.read()


def raise_descriptors():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connect(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def rate(name, seconds, operation, **extra):
    for _ in range(200):
        operation()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(50):
            operation()
        count += 50
    per_second = count / (time.perf_counter() - started)
    show(name, per_second=round(per_second), us=round(1e6 / per_second, 2), **extra)


def show(name, **fields):
    print(json.dumps({"store": "torch", "version": torch.__version__, "bench": name, **fields}), flush=True)


def join(port, clients):
    """Connects from a few threads: the constructor releases the interpreter's lock while it waits."""
    threads, stores = 64, []
    lock = threading.Lock()

    def some(count):
        mine = [connect(port) for _ in range(count)]
        with lock:
            stores.extend(mine)

    counts = [clients // threads + (index < clients % threads) for index in range(threads)]
    started = time.perf_counter()
    workers = [threading.Thread(target=some, args=(count,)) for count in counts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    show("join", clients=len(stores), asked=clients, seconds=round(seconds, 3))
    return stores


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--no-join", action="store_true")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        return serve()

    raise_descriptors()
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        store = connect(port)
        value = "v" * 64
        store.set("key", value)
        rate("get", options.seconds, lambda: store.get("key"), value_bytes=64)
        rate("set", options.seconds, lambda: store.set("key", value), value_bytes=64, confirmed=False)
        rate("set_confirmed", options.seconds, lambda: (store.set("key", value), store.check(["key"])), value_bytes=64)
        rate("add", options.seconds, lambda: store.add("count", 1))
        idle = join(port, options.idle)
        rate("get_idle", options.seconds, lambda: store.get("key"), value_bytes=64, idle_clients=len(idle))
        del idle
        if not options.no_join:
            join(port, options.clients)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
