"""Training steps of a GPT in PyTorch over Gloo, one thread per rank, in each layout of a model over ranks: the model of
crates/nn/src/gpt.rs in f32, AdamW (fused), random tokens.

Usage: layouts.py HEADS WIDTH CONTEXT VOCABULARY

For each line `LAYOUT RANKS SEQUENCES MICRO_BATCHES LAYERS STEPS` of stdin, it starts RANKS processes and prints the median step time in
seconds, or `failed`. The time is that of the rank whose steps take longest. SEQUENCES are those of all ranks together, and of
each of them for a layout that trains apart:

    apart           each rank trains alone
    recompute       the same with checkpointed blocks
    ddp             DistributedDataParallel; under it, `replicate` of parameters that `tp` has cut
    zero1           the same with ZeroRedundancyOptimizer
    zero2, zero3    fully_shard of each block, which keeps whole weights between forward and backward or not
    gpipe, 1f1b     torch.distributed.pipelining, one stage per rank
    zb              ScheduleInterleavedZeroBubble, one stage per rank
    interleaved     ScheduleInterleaved1F1B, two stages per rank
    zbv             ScheduleZBVZeroBubble, two stages per rank; the first and the last one share a rank
    tp              parallelize_module, with the embedding, scores and loss cut by tokens

Several with a `+` between them, in this order, are the dimensions of a mesh of equal sides: `zero3+tp` on four ranks is two by two.
"""

import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor, Replicate
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


def adamw(models):
    # Fused AdamW takes no mixture of plain and distributed parameters, nor of meshes.
    groups = defaultdict(list)
    for model in models:
        for parameter in model.parameters():
            groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], 1e-3, fused=True)


def whole(model, micro_batches):
    """The gradients of a rank that has the whole model, as far as it can see."""

    def backward(batch):
        for inputs, targets in pieces(batch, micro_batches):
            (loss_of(model(inputs), targets) / micro_batches).backward()

    return backward


def cut(model, mesh):
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("output", "down")})
    tokens = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, mesh, tokens)


def deal(model, kind, mesh, is_cut):
    """The model in data parallelism."""
    modules = *model.blocks, model
    if kind == "ddp" and is_cut:
        for module in modules:
            replicate(module, mesh=mesh)
    elif kind in ("ddp", "zero1"):
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    else:
        for module in modules:
            fully_shard(module, mesh=mesh, reshard_after_forward=kind == "zero3" and module is not model)
    return model


def own_part(weight):
    """The gradient of what this rank has of a parameter."""
    if not isinstance(weight, DTensor):
        return weight.grad
    # That of a cut embedding is whole.
    weight.grad = weight.grad.redistribute(placements=weight.placements)
    return weight.grad.to_local()


def pipeline(kind, shape, micro_batches, mesh, prepare):
    """The stages of a rank, as `prepare` returns them, and their gradients."""
    schedule, each = SCHEDULES[kind]
    rank, ranks = mesh.get_local_rank(), mesh.size()
    other = 2 * ranks - 1 - rank if kind == "zbv" else rank + ranks
    numbers = [rank, other][:each]
    parts = [Gpt(shape, stage, each * ranks) for stage in numbers]
    stages = [prepare(part) for part in parts]
    places = [
        PipelineStage(stage, number, each * ranks, torch.device("cpu"), group=mesh.get_group())
        for stage, number in zip(stages, numbers)
    ]
    run = schedule(places if issubclass(schedule, PipelineScheduleMulti) else places[0], micro_batches, loss_fn=loss_of)
    # The scores' matrix is the embedding's: both ends add their gradients.
    ends = [part for part in parts if part.is_first or part.is_last]
    if len(ends) == 1:
        first, *_, last = dist.get_process_group_ranks(mesh.get_group())
        pair = dist.new_group([first, last], use_local_synchronization=True)

    def backward(batch):
        inputs = [batch[0]] if any(part.is_first for part in parts) else []
        target = {"target": batch[1]} if any(part.is_last for part in parts) else {}
        run.step(*inputs, **target)
        grads = [own_part(end.tokens.weight) for end in ends]
        if len(grads) == 1:
            dist.all_reduce(grads[0], group=pair)
        elif grads:
            grads[1].copy_(grads[0].add_(grads[1]))

    return stages, backward


# The schedule, and the stages of a rank.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "zb": (ScheduleInterleavedZeroBubble, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}
DATA_PARALLEL = "ddp", "zero1", "zero2", "zero3"


def adamw(models):
    # Fused AdamW takes no mixture of plain and distributed parameters, nor of meshes.
    groups = defaultdict(list)
    for model in models:
        for parameter in model.parameters():
            groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], 1e-3, fused=True)


def arrange(layout, shape, micro_batches):
    """The gradients and the optimizer of a rank, what surrounds them, and the number of replicas."""
    if layout in ("apart", "recompute"):
        model = Gpt(shape)
        if layout == "recompute":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return whole(model, micro_batches), adamw([model]), torch.enable_grad, 1
    kinds = tuple(layout.split("+"))
    side = round(dist.get_world_size() ** (1 / len(kinds)))
    mesh = init_device_mesh("cpu", (side,) * len(kinds), mesh_dim_names=kinds)
    data = kinds[0] if kinds[0] in DATA_PARALLEL else None

    def prepare(model):
        if "tp" in kinds:
            cut(model, mesh["tp"])
        return deal(model, data, mesh[data], "tp" in kinds) if data else model

    schedule = next((kind for kind in kinds if kind in SCHEDULES), None)
    if schedule:
        models, backward = pipeline(schedule, shape, micro_batches, mesh[schedule], prepare)
    else:
        models = [prepare(Gpt(shape))]
        backward = whole(models[0], micro_batches)
    if data == "zero1":
        group = mesh[data].get_group()
        optimizer = ZeroRedundancyOptimizer(
            models[0].parameters(), torch.optim.AdamW, group, parameters_as_bucket_view=True, lr=1e-3, fused=True
        )
    else:
        optimizer = adamw(models)
    return backward, optimizer, loss_parallel if "tp" in kinds else torch.enable_grad, side if data else 1


def train(shape, layout, rank, ranks, sequences, micro_batches, layers, steps, store):
    """The median step time of a rank."""
    torch.manual_seed(0)
    together = layout not in ("apart", "recompute")
    if together:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    backward, optimizer, around, replicas = arrange(layout, (layers, *shape), micro_batches)
    *_, context, vocabulary = shape
    stream = torch.randint(vocabulary, (sequences // replicas, context + 1))
    batch = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    seconds = []
    for _ in range(WARMUP + steps):
        start = time.perf_counter()
        with around():
            backward(batch)
        optimizer.step()
        optimizer.zero_grad()
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
