"""Training steps of a GPT in PyTorch over Gloo, one thread per rank, in each layout of a model over ranks: the model of
crates/nn/src/gpt.rs in f32, AdamW (fused), random tokens.

Usage: layouts.py LAYERS HEADS WIDTH CONTEXT VOCABULARY

For each line `LAYOUT RANKS SEQUENCES MICRO_BATCHES STEPS` of stdin, it starts RANKS processes and prints the median step time in
seconds, or `failed`. The time is that of the rank whose steps take longest. SEQUENCES are those of all ranks together, and of
each of them for a layout that trains apart:

    apart           each rank trains alone
    recompute       the same with checkpointed blocks
    ddp             DistributedDataParallel
    zero1           the same with ZeroRedundancyOptimizer
    zero2, zero3    fully_shard of each block, which keeps whole weights between forward and backward or not
    gpipe, 1f1b     torch.distributed.pipelining, one stage per rank
    tp              parallelize_module, with the embedding, scores and loss cut by tokens
"""

import os
import statistics
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WARMUP = 3


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.attention_norm(x)

        def heads(layer):
            return layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.query), heads(self.key), heads(self.value), is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Gpt(nn.Module):
    """The blocks of one stage of `stages`; the first one has the embedding and the last one the scores. A pipeline of several
    stages has the tokens' matrix on both."""

    def __init__(self, shape, stage=0, stages=1):
        super().__init__()
        layers, heads, width, context, vocabulary = shape
        own = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first or self.is_last:
            self.tokens = nn.Embedding(vocabulary, width)
        if self.is_first:
            self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in own)
        if self.is_last:
            self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.is_last:
            x = self.scores(self.norm(x))
        return x

    def scores(self, x):
        weight = self.tokens.weight
        if isinstance(weight, DTensor):
            x = DTensor.from_local(x, weight.device_mesh, [Replicate()])
        return F.linear(x, weight)


def loss_of(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def pieces(batch, count):
    return zip(*(part.chunk(count) for part in batch))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def train_whole(model, optimizer, micro_batches, around=torch.enable_grad):
    """A step of a rank that has the whole model, as far as it can see."""

    def step(batch):
        with around():
            for inputs, targets in pieces(batch, micro_batches):
                (loss_of(model(inputs), targets) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def apart(shape, micro_batches, recompute=False):
    model = Gpt(shape)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return train_whole(model, optimizer_of(model), micro_batches)


def ddp(shape, micro_batches):
    model = DistributedDataParallel(Gpt(shape), gradient_as_bucket_view=True)
    return train_whole(model, optimizer_of(model), micro_batches)


def zero1(shape, micro_batches):
    model = DistributedDataParallel(Gpt(shape), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True
    )
    return train_whole(model, optimizer, micro_batches)


def sharded(shape, micro_batches, drop):
    model = Gpt(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=drop)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return train_whole(model, optimizer_of(model), micro_batches)


def pipeline(shape, micro_batches, schedule):
    stage, stages = dist.get_rank(), dist.get_world_size()
    model = Gpt(shape, stage, stages)
    optimizer = optimizer_of(model)
    place = PipelineStage(model, stage, stages, torch.device("cpu"))
    run = schedule(place, micro_batches, loss_fn=loss_of)
    # The scores' matrix is the embedding's: both ends add their gradients.
    ends = dist.new_group([0, stages - 1])

    def step(batch):
        inputs = [batch[0]] if model.is_first else []
        target = {"target": batch[1]} if model.is_last else {}
        run.step(*inputs, **target)
        if model.is_first or model.is_last:
            dist.all_reduce(model.tokens.weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(shape, micro_batches):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Gpt(shape)
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("output", "down")})
    tokens = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, mesh, tokens)
    # Fused AdamW takes no mixture of plain and distributed parameters.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (False, True)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], 1e-3, fused=True)
    return train_whole(model, optimizer, micro_batches, loss_parallel)


LAYOUTS = {
    "apart": apart,
    "recompute": lambda *job: apart(*job, recompute=True),
    "ddp": ddp,
    "zero1": zero1,
    "zero2": lambda *job: sharded(*job, drop=False),
    "zero3": lambda *job: sharded(*job, drop=True),
    "gpipe": lambda *job: pipeline(*job, ScheduleGPipe),
    "1f1b": lambda *job: pipeline(*job, Schedule1F1B),
    "tp": tensor_parallel,
}
# Layouts without other ranks, and those whose ranks share the sequences.
ALONE = {"apart", "recompute"}
DATA_PARALLEL = {"ddp", "zero1", "zero2", "zero3"}


def train(shape, layout, rank, ranks, sequences, micro_batches, steps, store):
    """The median step time of a rank."""
    torch.manual_seed(0)
    together = layout not in ALONE
    if together:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    step = LAYOUTS[layout](shape, micro_batches)
    own = sequences // ranks if layout in DATA_PARALLEL else sequences
    context, vocabulary = shape[3:]
    stream = torch.randint(vocabulary, (own, context + 1))
    batch = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    seconds = []
    for _ in range(WARMUP + steps):
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
    if together:
        dist.barrier()
    return statistics.median(seconds[WARMUP:])


def run(shape, layout, ranks, *sizes):
    """Forks the ranks. *Returns* the largest of their median step times, or None."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            receive, send = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    seconds = train(shape, layout, rank, ranks, *sizes, os.path.join(folder, "store"))
                    os.write(send, repr(seconds).encode())
                    code = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    # Without Gloo's destructors, which wait for other ranks.
                    os._exit(code)
            os.close(send)
            children.append((child, receive))
        medians = []
        for child, receive in children:
            with os.fdopen(receive, "rb") as text:
                medians.append(text.read())
        codes = [os.waitpid(child, 0)[1] for child, _ in children]
    return None if any(codes) else max(map(float, medians))


def main():
    shape = [int(size) for size in sys.argv[1:]]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        layout, *sizes = line.split()
        seconds = run(shape, layout, *map(int, sizes))
        print("failed" if seconds is None else seconds, flush=True)


if __name__ == "__main__":
    main()
