"""DeepSpeed's ZeRO on the backend `paceline`, on CPU.

    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 examples/torch/recipes/deepspeed_zero.py
    DS_ACCELERATOR=cpu paceline run --nproc-per-node 2 examples/torch/recipes/deepspeed_zero.py
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, help="DeepSpeed's launcher adds it")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    inputs = torch.randn(512, 16)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(64):
        batch = inputs[(step * world + rank) * 16 % 512 :][:16]
        loss = torch.nn.functional.mse_loss(engine(batch), batch.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    if rank == 0:
        print(f"{dist.get_backend()}, {world} ranks, stage {args.stage}: loss {mean.item() / world:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
