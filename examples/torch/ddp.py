"""A tiny PyTorch DDP program: the same under torchrun and under `paceline run`.

    torchrun       --nproc-per-node 2 examples/torch/ddp.py
    paceline run   --nproc-per-node 2 examples/torch/ddp.py

On two nodes, with a restart after a failure, from the last checkpoint:

    paceline run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1 --max-restarts 1 \
        examples/torch/ddp.py --checkpoint /shared/ddp.pt
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="gloo", help="gloo, or paceline if its package is installed")
    parser.add_argument("--checkpoint", help="where to continue from; all nodes must see it")
    parser.add_argument("--die-at", type=int, help="in the first life, the last rank is killed at this step")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # The same eight samples however many ranks there are, each rank its part.
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 8, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True)
    inputs, targets = inputs[rank::world], targets[rank::world]

    first_step = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.module.load_state_dict(saved["model"])
        first_step = saved["step"]
        print(f"rank {rank} continues at step {first_step}", flush=True)

    for step in range(first_step, args.steps):
        if step == args.die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            dist.barrier()  # rank 0 has saved
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.6f}", flush=True)
            if args.checkpoint:
                torch.save({"model": model.module.state_dict(), "step": step + 1}, args.checkpoint + ".new")
                os.replace(args.checkpoint + ".new", args.checkpoint)
    print(f"rank {rank} of {world} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
