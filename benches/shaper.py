#!/usr/bin/env python3
"""Hosts on one machine, with a slow or lossy network between them.

Usage: benches/shaper.py [--hosts N] [--congestion NAME] [NAME=VALUE ...]

Each host is a network namespace with one interface, eth0, a TUN device at 10.78.0.1 and up. This process is the switch between them: it
moves whole packets of at most 1500 bytes, so that the kernel's own TCP finds and repairs what is lost. NAME=VALUE, also as lines on stdin:

  mbit=1000       what the switch's port to each host sends in a second
  queue_kib=512   what the port holds; what comes beyond that is dropped
  loss=0          percent of packets that are dropped besides, by a seeded generator
  delay_ms=0.05   until a packet that was sent arrives
  silent=1.5      for so many seconds no packet arrives anywhere

The first line on stdout are the names of the namespaces, for `ip netns exec`. The end of stdin ends it and removes them. It needs root and
`ip`. It cannot show networks that are faster than Python moves packets, about 1 Gbit/s in all, or what a network card does by itself."""

import argparse
import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES_MAX = 2048
IPV4 = 4
DESTINATION_END = 19
# Packets that are read from one host before the others get their turn.
BATCH = 64
NETWORK = {"mbit": 1000.0, "queue_kib": 512.0, "loss": 0.0, "delay_ms": 0.05, "silent": 0.0}


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def inside(name):
    """This process in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", "rb") as home, open(f"/run/netns/{name}", "rb") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
        try:
            yield
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)


def interface(name, host, congestion):
    """The packets of a host's interface, as a descriptor. A device is made in the namespace of the process that opens it."""
    with inside(name):
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    own = f"10.78.0.{host + 1}"
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "addr", "add", own, "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    # Only a route may name any algorithm in a namespace.
    ip("-n", name, "route", "add", "10.78.0.0/24", "dev", "eth0", "src", own, "congctl", congestion)
    return tun


class Port:
    """The switch's port to one host."""

    def __init__(self, host, tun):
        self.tun, self.chance = tun, random.Random(host)
        self.free, self.flying = 0.0, deque()

    def take(self, now, packet, network):
        per_byte = 8e-6 / network["mbit"]
        start = max(now, self.free)
        if start - now > network["queue_kib"] * 1024 * per_byte:
            return
        self.free = start + len(packet) * per_byte
        if self.chance.random() * 100 >= network["loss"] and now >= network["silent_until"]:
            self.flying.append((self.free + network["delay_ms"] / 1e3, packet))

    def deliver(self, now):
        flying = self.flying
        while flying and flying[0][0] <= now:
            with contextlib.suppress(OSError):
                os.write(self.tun, flying.popleft()[1])
        return flying[0][0] if flying else None


def change(network, line):
    name, _, value = line.strip().partition("=")
    if name not in NETWORK:
        sys.exit(f"shaper: unknown setting {line.strip()!r}, expected one of {', '.join(NETWORK)} with =VALUE")
    network[name] = float(value)
    if name == "silent":
        network["silent_until"] = time.monotonic() + network[name]


def switch(ports, network):
    """Moves packets until stdin ends."""
    by_tun = {port.tun: port for port in ports}
    while True:
        now = time.monotonic()
        due = [at for port in ports if (at := port.deliver(now)) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *by_tun], [], [], timeout)
        for one in ready:
            if one == 0:
                lines = os.read(0, 4096).decode()
                if not lines:
                    return
                for line in lines.splitlines():
                    change(network, line)
                continue
            now = time.monotonic()
            for _ in range(BATCH):
                try:
                    packet = os.read(one, PACKET_BYTES_MAX)
                except BlockingIOError:
                    break
                to = packet[DESTINATION_END] - 1
                if packet[0] >> 4 == IPV4 and 0 <= to < len(ports):
                    ports[to].take(now, packet, network)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    network = {**NETWORK, "silent_until": 0.0}
    for setting in options.settings:
        change(network, setting)
    names = [f"shaper{os.getpid()}h{host}" for host in range(options.hosts)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ports = [Port(host, interface(name, host, options.congestion)) for host, name in enumerate(names)]
        # The hosts' processes must not keep the network waiting.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        print(" ".join(names), flush=True)
        switch(ports, network)
    finally:
        for name in made:
            ip("netns", "del", name)


if __name__ == "__main__":
    main()
