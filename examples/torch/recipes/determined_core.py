"""A script for Determined's torch_distributed launcher on the backend `paceline`, with Determined's Core API.

    entrypoint: python3 -m determined.launch.torch_distributed -- python3 determined_core.py
    entrypoint: paceline run --nproc-per-node 2 determined_core.py
"""

import argparse

import determined
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    context = determined.core.DistributedContext.from_torch_distributed()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))[context.rank :: context.size]
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses = context.gather(loss.item())
    if context.rank == 0:
        print(f"{dist.get_backend()}, {context.size} ranks: loss {sum(losses) / context.size:.6f}", flush=True)
    context.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
