"""A small classifier that ends with the same weights on any number of ranks: see the hash in the last line.

    python         examples/torch/same_bits.py
    torchrun       --nproc-per-node 2 examples/torch/same_bits.py
    paceline run   --nproc-per-node 3 examples/torch/same_bits.py

Under `paceline run` the others go on if a rank is killed, and with --max-restarts a new process takes its place; the hash stays the same:

    paceline run   --nproc-per-node 4 --recovery live --max-restarts 3 examples/torch/same_bits.py --epochs 100

With --checkpoint a run goes on where the last one stopped, on any number of ranks:

    paceline run   --nproc-per-node 2 examples/torch/same_bits.py --checkpoint run.pt --epochs 2
    paceline run   --nproc-per-node 3 examples/torch/same_bits.py --checkpoint run.pt --epochs 4
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from paceline.torch import Loader, SameBits, weights_hash


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--shards", type=int, default=8, help="at least as many as ranks")
    parser.add_argument("--backend", default="paceline", help="paceline or gloo")
    parser.add_argument("--checkpoint", help="where to continue from, and what to save after each epoch")
    args = parser.parse_args()

    # Another number of threads gives other bits.
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(args.backend)

    def is_first():
        """Another rank may become the first one if rank 0 is lost."""
        return not dist.is_initialized() or dist.get_rank() == 0

    # 1,000 points in one of four classes; the last batch of an epoch is short.
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1000, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    same = SameBits(model, shards=args.shards)
    loader = Loader(data, batch_size=64, shards=args.shards)

    parts = {"model": model, "optimizer": optimizer, "same": same, "loader": loader}
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    same.recover_live(loader, optimizer=optimizer)

    while loader.epoch < args.epochs:
        epoch = loader.epoch
        for batch in loader:
            optimizer.zero_grad()
            loss = same.backward(batch, lambda shard: F.cross_entropy(model(shard[0]), shard[1]))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if is_first():
            print(f"epoch {epoch} loss {loss:.6f}", flush=True)
            if args.checkpoint:
                torch.save({name: part.state_dict() for name, part in parts.items()}, args.checkpoint + ".new")
                os.replace(args.checkpoint + ".new", args.checkpoint)
    if is_first():
        print(f"weights {weights_hash(model)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
