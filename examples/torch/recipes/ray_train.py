"""Ray's TorchTrainer on the backend `paceline`, on CPU.

    python examples/torch/recipes/ray_train.py
"""

import argparse
import tempfile

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train():
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16))
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(4):
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
        ray.train.report({"loss": mean.item()})
    world = ray.train.get_context().get_world_size()
    print(f"{torch.distributed.get_backend()}, {world} ranks: loss {mean.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend=args.backend),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
