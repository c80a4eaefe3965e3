#!/usr/bin/env python3
"""Reads an epoch of an image folder with torchvision and PyTorch's DataLoader, for benches/images.py.

Usage: images.py FOLDER SIDE BATCH WORKERS

Prints a JSON object: samples per second from the second batch on, and the peak memory of this process and its workers in MiB, with what they share counted in each.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torchvision import datasets, transforms


def main():
    folder, (side, batch, workers) = sys.argv[1], map(int, sys.argv[2:])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    prepare = transforms.Compose([
        transforms.RandomResizedCrop(side, antialias=True),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    loader = torch.utils.data.DataLoader(datasets.ImageFolder(folder, prepare), batch, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    start, samples, last = time.perf_counter(), 0, 0.0
    peak = 0.0
    for images, _ in batches:
        samples += len(images)
        last = time.perf_counter()
        if workers:
            peak = max(peak, memory([worker.pid for worker in batches._workers]))
    print(json.dumps({"samples_per_second": samples / (last - start), "peak_mib": peak or memory([])}))


def memory(workers):
    """The most that this process and each worker has held until now."""
    total = 0.0
    for process in ["self", *workers]:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except FileNotFoundError:
            continue
        total += int(status.split("VmHWM:")[1].split()[0]) / 1024
    return total


if __name__ == "__main__":
    main()
