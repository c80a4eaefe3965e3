"""Hugging Face's Trainer on the backend `paceline`, on CPU: a tiny GPT-2 on made-up tokens.

    paceline run --nproc-per-node 2 examples/torch/recipes/trainer_ddp.py
    torchrun --nproc-per-node 2 examples/torch/recipes/trainer_ddp.py
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="paceline")
    args = parser.parse_args()
    # The Trainer takes a group that it finds, and would choose Gloo.
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    tokens = [torch.arange(start, start + 32) % 61 for start in range(128)]
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        learning_rate=5e-3,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:30])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{dist.get_backend()}, {arguments.world_size} ranks: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
