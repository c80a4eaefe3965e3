"""Accelerate on the backend `paceline`, on CPU.

    paceline run --nproc-per-node 2 examples/torch/recipes/accelerate_ddp.py
    accelerate launch --multi_gpu --num_processes 2 examples/torch/recipes/accelerate_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    args = parser.parse_args()
    # Accelerate takes a group that it finds, and would choose Gloo.
    dist.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02), loader)
    for _ in range(4):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
    accelerator.print(f"{dist.get_backend()}, {accelerator.num_processes} ranks: loss {losses.mean():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
