"""Lightning on the backend `paceline`, on CPU.

    python examples/torch/recipes/lightning_ddp.py
    paceline run --nproc-per-node 2 examples/torch/recipes/lightning_ddp.py
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    args = parser.parse_args()
    lightning.seed_everything(0)
    inputs = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    strategy = DDPStrategy(process_group_backend=args.backend)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=4, **quiet)
    trainer.fit(Model(), loader)
    trainer.print(f"{torch.distributed.get_backend()}, {trainer.world_size} ranks: loss {trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
