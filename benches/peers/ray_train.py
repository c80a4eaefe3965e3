"""The job of engine.py by Ray Train's TorchTrainer. Usage: ray_train.py OUT RANKS, with RAY_ADDRESS naming the cluster."""

import sys
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = str(Path(__file__).resolve().parent)


def loop(config):
    sys.path.insert(0, config["folder"])
    import engine

    engine.train(config["out"])


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config={"out": sys.argv[1], "folder": FOLDER},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(sys.argv[2]), placement_strategy="SPREAD"),
    ).fit()
