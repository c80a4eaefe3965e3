"""The backend `paceline` of torch.distributed beside Gloo, and what it does when something goes wrong.

Usage: backend.py [NAME...]: all cases, or those with a name in the list. Each rank is a forked process. `cargo test -p paceline-python` runs
it if PACELINE_TEST_PYTHON is a Python with torch.
"""

import faulthandler
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch._dynamo  # once, before the ranks are forked
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from forked import FORK, free_port, run_named
from torch.nn.parallel import DistributedDataParallel

CASES = []
TIMEOUT = timedelta(seconds=30)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def case(*worlds, killed=(), failed=()):
    """A function that each rank calls in a group of its own; ranks that are killed or fail are named."""

    def add(function):
        CASES.extend((function, world, killed, failed) for world in worlds)
        return function

    return add


def rank_main(function, rank, world, port):
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("paceline", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=TIMEOUT)
    function(rank, world)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(function, world, killed, failed):
    port = free_port()
    ranks = [FORK.Process(target=rank_main, args=(function, rank, world, port)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    expected = [-signal.SIGKILL if rank in killed else 1 if rank in failed else 0 for rank in range(world)]
    codes = [process.exitcode for process in ranks]
    assert codes == expected, f"exit codes {codes}, expected {expected}"


def raises(call):
    try:
        call()
    except RuntimeError as error:
        return error
    raise AssertionError("it did not fail")


def equal(one, other, words):
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), words
        for left, right in zip(one, other):
            equal(left, right, words)
    elif one.dtype.is_floating_point or one.dtype.is_complex:
        # Sums of three ranks may be rounded in another order.
        assert torch.allclose(one, other, rtol=2e-2 if one.element_size() == 2 else 1e-6), (words, one, other)
    else:
        assert torch.equal(one, other), (words, one, other)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]


@case(2, 3)
def agrees_with_gloo(rank, world):
    gloo = dist.new_group(backend="gloo")

    def make(dtype, *shape, seed=rank):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(1, 5, shape, generator=generator)
        return (numbers + 0.5 if dtype.is_floating_point else numbers).to(dtype)

    def both(words, call):
        own = call(None)
        try:
            other = call(gloo)
        except RuntimeError as error:
            # Not all of Gloo's operations take all types, and until PyTorch 2.8 it lacks some.
            lacks = "Invalid scalar type", "Cannot use ReduceOp.AVG", "does not support reduce_scatter"
            assert any(words in str(error) for words in lacks), error
            return
        equal(own, other, words)

    for dtype in DTYPES:
        reductions = ["SUM", "PRODUCT", "MIN", "MAX", *(["AVG"] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"])]
        for reduction in reductions:
            op = getattr(dist.ReduceOp, reduction)

            def all_reduce(group, dtype=dtype, op=op):
                tensor = make(dtype, 33)
                dist.all_reduce(tensor, op, group=group)
                return tensor

            def reduce(group, dtype=dtype, op=op):
                tensor = make(dtype, 7)
                dist.reduce(tensor, world - 1, op, group=group)
                return tensor if rank == world - 1 else make(dtype, 7)

            def reduce_scatter(group, dtype=dtype, op=op):
                output = torch.empty(5, dtype=dtype)
                dist.reduce_scatter_tensor(output, make(dtype, 5 * world), op, group=group)
                return output

            both(f"all_reduce {dtype} {reduction}", all_reduce)
            both(f"reduce {dtype} {reduction}", reduce)
            # Gloo adds until PyTorch 2.8, whatever it is asked for.
            if reduction == "SUM" or VERSION > (2, 8):
                both(f"reduce_scatter_tensor {dtype} {reduction}", reduce_scatter)

    for dtype in [*DTYPES, torch.bool, torch.complex64, torch.complex128]:
        for shape in [(4, 3), (0,), ()]:

            def broadcast(group, dtype=dtype, shape=shape):
                tensor = make(dtype, *shape)
                dist.broadcast(tensor, world - 1, group=group)
                return tensor

            def all_gather(group, dtype=dtype, shape=shape):
                outputs = [torch.empty(shape, dtype=dtype) for _ in range(world)]
                dist.all_gather(outputs, make(dtype, *shape), group=group)
                return outputs

            def gather(group, dtype=dtype, shape=shape):
                outputs = [torch.empty(shape, dtype=dtype) for _ in range(world)] if rank == 1 else None
                dist.gather(make(dtype, *shape), outputs, 1, group=group)
                return outputs or []

            def scatter(group, dtype=dtype, shape=shape):
                output = torch.empty(shape, dtype=dtype)
                inputs = [make(dtype, *shape, seed=i) for i in range(world)] if rank == 0 else None
                dist.scatter(output, inputs, 0, group=group)
                return output

            for call in (broadcast, all_gather, gather, scatter):
                both(f"{call.__name__} {dtype} {shape}", call)

    def strided(group):
        whole = make(torch.float32, 6, 4)
        # Gloo in PyTorch 2.15 adds what lies behind the first number of a column, not the column.
        column = whole[:, 1].clone() if group else whole[:, 1]
        dist.all_reduce(column, group=group)
        whole[:, 1] = column
        turned = whole.t().contiguous() if group else whole.t()
        dist.broadcast(turned, 0, group=group)
        return turned

    def all_gather_into_tensor(group):
        output = torch.empty(world * 3)
        dist.all_gather_into_tensor(output, make(torch.float32, 3), group=group)
        return output

    def reduce_scatter(group):
        output = torch.empty(3)
        dist.reduce_scatter(output, [make(torch.float32, 3, seed=rank + i) for i in range(world)], group=group)
        return output

    def all_to_all_single(group):
        output = torch.empty(2 * world, 2)
        dist.all_to_all_single(output, make(torch.float32, 2 * world, 2), group=group)
        return output

    def all_to_all_splits(group):
        sizes = [(rank + i) % 3 for i in range(world)]
        output = torch.empty(sum(sizes), 2)
        dist.all_to_all_single(output, make(torch.float32, sum(sizes), 2), sizes, sizes, group=group)
        return output

    def all_reduce_coalesced(group):
        tensors = [make(torch.float32, 3), make(torch.float32, 2, 2)]
        dist.all_reduce_coalesced(tensors, group=group)
        return tensors

    def objects(group):
        outputs = [None] * world
        dist.all_gather_object(outputs, {"rank": rank, "text": "x" * rank}, group=group)
        assert outputs == [{"rank": i, "text": "x" * i} for i in range(world)]
        shared = [("from", rank) if rank == 0 else None]
        dist.broadcast_object_list(shared, 0, group=group)
        assert shared == [("from", 0)]
        return []

    def messages(group):
        right, left = (rank + 1) % world, (rank - 1) % world
        sent, got = make(torch.float32, 9), torch.empty(9)
        works = [dist.isend(sent, right, group=group, tag=3), dist.irecv(got, left, group=group, tag=3)]
        for work in works:
            work.wait()
        batch = [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, other := torch.empty(9), left, group)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return [got, other]

    calls = [strided, all_gather_into_tensor, reduce_scatter, all_to_all_single, all_to_all_splits, all_reduce_coalesced, objects, messages]
    for call in calls:
        both(call.__name__, call)

    # The list form of Gloo takes tensors of one size only.
    inputs = [make(torch.float32, 2, seed=10 * rank + i) for i in range(world)]
    outputs = [torch.empty(2) for _ in range(world)]
    dist.all_to_all(outputs, inputs)
    equal(outputs, [make(torch.float32, 2, seed=10 * i + rank) for i in range(world)], "all_to_all")
    flags = torch.tensor([rank == 1, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    equal(flags, torch.tensor([True, False, True]), "all_reduce of bool")
    waves = torch.full((2,), complex(rank, 1))
    dist.all_reduce(waves)
    equal(waves, torch.full((2,), complex(sum(range(world)), world)), "all_reduce of complex")
    small = torch.tensor([rank], dtype=torch.int16)
    dist.broadcast(small, 1)
    assert small.item() == 1
    assert "cannot reduce torch.int16" in str(raises_type(lambda: dist.all_reduce(small)))


def raises_type(call):
    try:
        call()
    except TypeError as error:
        return error
    raise AssertionError("it did not fail")


@case(2, 3)
def averages_of_whole_numbers_are_rounded_towards_zero(rank, world):
    own = torch.tensor([[10 * rank + 3, -5 - rank], [world, 0]])
    sums = world * 3 + 10 * sum(range(world)), -5 * world - sum(range(world)), world * world, 0
    averages = torch.tensor([int(total / world) for total in sums]).reshape(2, 2)
    for dtype in (torch.int64, torch.int32, torch.int8):
        tensor = own.to(dtype)
        dist.all_reduce(tensor, AVG)
        equal(tensor, averages.to(dtype), f"all_reduce {dtype}")
    turned = own.clone().t()
    dist.all_reduce(turned, AVG, async_op=True).wait()
    equal(turned, averages.t(), "all_reduce of a tensor that is not contiguous")
    rooted = own.clone()
    dist.reduce(rooted, world - 1, AVG)
    equal(rooted, averages if rank == world - 1 else own, "reduce")
    part = torch.empty(4, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, own.flatten().repeat(world), AVG)
    equal(part, averages.flatten(), "reduce_scatter_tensor")


@case(3)
def works_are_asynchronous(rank, world):
    tensors = [torch.full((1000,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert works[0].is_completed() and works[0].is_success() and works[0].exception() is None
    for i, tensor in enumerate(tensors):
        assert tensor[0] == sum(range(world)) + world * i
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    doubled = [future.then(lambda future: future.value()[0] * 2) for future in futures]
    for i, (future, tensor) in enumerate(zip(doubled, tensors)):
        assert torch.equal(future.wait(), tensor * 2), i
    # The part of a tensor that lies apart is in its place when the work is over.
    whole = torch.zeros(4, 4)
    whole[:, 0] = rank
    work = dist.all_reduce(whole[:, 0], async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert whole[3, 0] == sum(range(world))

    # A wait has a limit of its own; the operation goes on.
    if rank == 0:
        late = torch.zeros(1)
        work = dist.irecv(late, 1)
        assert not work.is_completed()
        error = raises(lambda: work.wait(timedelta(milliseconds=20)))
        assert error.kind == "timeout" and "goes on" in str(error), error
        dist.send(torch.ones(1), 1)
        work.wait()
        assert late.item() == 2
    elif rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((1,), 2.0), 0)
    # From any rank, with the rank that it was.
    if rank == 0:
        seen = {dist.recv(torch.zeros(1), tag=9) for _ in range(world - 1)}
        assert seen == set(range(1, world)), seen
    else:
        dist.send(torch.ones(1), 0, tag=9)


@case(2)
def forgotten_works_keep_their_tensors(rank, world):
    for _ in range(50):
        dist.all_reduce(torch.ones(1 << 16), async_op=True)
    gc.collect()
    if rank == 0:
        dist.irecv(torch.zeros(1 << 16), 1)  # never sent
        gc.collect()
    noise = [torch.zeros(1 << 16) for _ in range(50)]
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total[0] == world and all(not tensor.any() for tensor in noise)


@case(2)
def works_that_only_torch_itself_holds_are_waited_for_and_freed(rank, world):
    from paceline.torch.work import Work

    for _ in range(20):
        summed = functional.all_reduce(torch.full((1000,), float(rank)), "sum", dist.group.WORLD)
        both = functional.all_gather_tensor(summed, 0, dist.group.WORLD)
        assert both.sum() == 1000 * world * sum(range(world))
    train(None, rank, world)
    dist.barrier()
    del summed, both
    gc.collect()
    dist.barrier()
    left = [thing for thing in gc.get_objects() if type(thing) is Work]
    assert len(left) < 20, len(left)


@case(4)
def groups_of_some_ranks(rank, world):
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    own = halves[rank % 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=own)
    assert tensor.item() == (2 if rank % 2 == 0 else 4)
    assert dist.get_rank(own) == [0, 0, 1, 1][rank], "new_group sorts the ranks"
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_group().size() == 2
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=mesh["tp"].get_group())
    assert gathered.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    summed = functional.all_reduce(torch.ones(3), "sum", mesh["dp"])
    assert summed.tolist() == [2, 2, 2]
    # Of another backend's ranks, through torch's store alone.
    gloo = dist.new_group([1, 2, 3], backend="gloo")
    if rank:
        dist.barrier(gloo)
    dist.destroy_process_group(own)
    dist.barrier()


@case(4)
def a_group_is_split(rank, world):
    half = dist.split_group(split_ranks=[[2, 0], [1, 3]], group_desc="half")
    assert dist.get_process_group_ranks(half) == [[2, 0], [1, 3]][rank % 2] and half.group_desc == "half"
    assert dist.get_rank(half) == [1, 0, 0, 1][rank], "the order of the list counts"
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=half)
    assert gathered.tolist() == [[2, 0], [1, 3]][rank % 2]
    # Only some ranks, twice; the others do not wait for them.
    for _ in range(2):
        pair = dist.split_group(split_ranks=[[1, 2]], timeout=timedelta(seconds=20), backend="paceline")
        assert (pair is dist.GroupMember.NON_GROUP_MEMBER) == (rank in (0, 3))
        if rank in (1, 2):
            assert dist.get_backend(pair) == "paceline"
            objects = [None, None]
            dist.all_gather_object(objects, rank, group=pair)
            assert objects == [1, 2]
            dist.destroy_process_group(pair)
    # A group of a group, by its numbers, beside another one of the same numbers.
    quarter = dist.split_group(half, [[1], [0]])
    assert dist.get_process_group_ranks(quarter) == [rank]
    summed = functional.all_reduce(torch.ones(3), "sum", dist.split_group(half, [[1, 0]]))
    assert summed.tolist() == [2, 2, 2]
    dist.destroy_process_group(half)
    dist.barrier()


def begin_again(rank, world, **options):
    """Another group of all ranks in place of the one that they have."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    options = {"timeout": TIMEOUT} | options
    dist.init_process_group("paceline", init_method=f"tcp://127.0.0.1:{port[0]}", rank=rank, world_size=world, **options)


@case(2)
def a_group_with_a_device_is_split_too(rank, world):
    begin_again(rank, world, device_id=torch.device("cpu:0"))
    for group in (dist.new_group(), dist.split_group(split_ranks=[[1, 0]])):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == world


@case(3)
def a_rank_that_a_new_group_waits_for_is_named(rank, world):
    begin_again(rank, world, timeout=timedelta(seconds=2))
    gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
    if rank < 2:
        made, split = raises(lambda: dist.new_group([0, 1, 2])), raises(lambda: dist.split_group(split_ranks=[[0, 1, 2]]))
        assert "for rank 2, which did not report in" in str(split), split
        assert (str(split), vars(split)) == (str(made), vars(made))
    dist.barrier(gloo)


@case(2)
def other_devices_have_the_backends_that_the_user_named(rank, world):
    mixed = dist.new_group(backend="cpu:paceline,meta:fake")
    elsewhere = torch.empty(3, device="meta")
    dist.all_reduce(elsewhere, group=mixed)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mixed)
    assert tensor.item() == world
    dist.all_reduce(elsewhere, group=dist.split_group(mixed, [[1, 0]]))
    for group in (None, dist.split_group(mixed, [[1, 0]], backend="cpu:paceline")):
        error = raises(lambda group=group: dist.all_reduce(elsewhere, group=group))
        assert 'init_process_group("cpu:paceline,meta:nccl")' in str(error), error


def train(group, rank, world):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(10):
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@case(2, 3)
def ddp_trains_as_with_gloo(rank, world):
    own, gloo = (train(group, rank, world) for group in (None, dist.new_group(backend="gloo")))
    assert all(abs(one - other) <= 1e-5 * abs(other) for one, other in zip(own, gloo)), (own, gloo)


@case(3, killed=[2])
def a_killed_rank_is_named(rank, world):
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    error = raises(lambda: dist.all_reduce(torch.ones(10)))
    assert isinstance(error, dist.DistBackendError)
    # The rank that notices first may tell the other one.
    assert error.kind in ("lost", "aborted"), vars(error)
    assert (error.culprit, error.rank, error.operation) == (2, rank, "all-reduce"), vars(error)
    assert error.hosts == [socket.gethostname()]
    assert "rank 2 (" in str(error) and "died" in str(error)
    assert time.monotonic() - started < 10
    # In a backward pass torch hands on the words alone.
    model = torch.nn.Linear(2, 1)
    error = raises(lambda: dist.all_reduce(torch.ones(1), async_op=True).get_future().wait())
    assert "rank 2 (" in str(error), error


@case(3, failed=[1])
def an_exception_is_told_to_the_others(rank, world):
    if rank == 1:
        # As at the end of a program: multiprocessing does not run what is to run at an exit.
        from paceline.torch import group

        sys.last_value = ValueError("no such file")
        group._leave()
        sys.exit(1)
    error = raises(lambda: dist.all_reduce(torch.ones(10)))
    assert (error.kind, error.culprit) == ("aborted", 1)
    assert "rank 1 gave up: ValueError: no such file" in str(error), error


@case(3)
def a_difference_between_ranks_is_named(rank, world):
    error = raises(lambda: dist.all_reduce(torch.ones(5 if rank == 1 else 4)))
    assert (error.kind, error.culprit) == ("mismatch", 1)
    assert "rank 1 called all-reduce (sum) of 5 f32" in str(error), error


@case(3)
def a_rank_that_is_missing_is_named_in_time(rank, world):
    if rank == 2:
        time.sleep(1.5)
        raises(dist.barrier)
        return
    error = raises(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.5)))
    words = "received errors while waiting for send/recv from rank 0" if rank else "Rank 2 failed to pass monitoredBarrier"
    assert (error.kind, error.culprits) == ("timeout", [2]) and words in str(error), vars(error)
    # Advice goes to the first rank that notices.
    assert error.hint is None or "give init_process_group, new_group or the call a longer timeout" in error.hint, error.hint


def steps(rank, samples):
    """A layer after three steps, and what has its fourth batch."""
    layer = torch.nn.Linear(2, 1)
    optimizer, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for _ in range(2))
    batches = iter(torch.utils.data.DataLoader(samples))
    for _ in range(3):
        layer(next(batches)).sum().backward()
        optimizer.step()
        other.step()  # is not counted
    return layer, batches


def what_rank_1_is_told_to_do(rank, slow):
    """The words of rank 0, which waits for it."""
    if rank == 1:
        slow()
        return str(raises(dist.barrier))
    return str(raises(lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=0.5))))


@case(2, 3)
def sparse_tensors_are_added(rank, world):
    for shape in ([4], [5, 3]):
        places = torch.tensor([[0, rank, rank + 1]])
        entries = torch.arange(3.0).reshape(3, *[1] * (len(shape) - 1)).expand(3, *shape[1:]) + rank
        sparse = torch.sparse_coo_tensor(places, entries.contiguous(), shape)
        dense = sparse.to_dense()
        dist.all_reduce(sparse)
        dist.all_reduce(dense)
        equal(sparse.to_dense(), dense, "sums")
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), [4])
    dist.all_reduce(nothing)
    assert nothing.coalesce().values().numel() == 0
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Embedding(8, 2, sparse=True), torch.nn.Linear(2, 1))
    model = DistributedDataParallel(layer)
    model(torch.tensor([rank, 7])).sum().backward()
    gradient = layer[0].weight.grad.to_dense()
    assert gradient[:world].abs().sum(1).min() > 0 and gradient[7].abs().sum() > 0, gradient
    raises_type(lambda: dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX))


@case(2)
def a_slow_sample_is_told_with_its_step(rank, world):
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(1.5 if index == 3 else 0)
            return torch.ones(2)

    _, batches = steps(rank, Samples())
    said = what_rank_1_is_told_to_do(rank, lambda: next(batches))
    assert "rank 1 (host" in said and "in the data loader at step 4" in said, said


@case(2)
def a_slow_backward_pass_is_told_with_its_step(rank, world):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(1.5)
            return gradient

    layer, batches = steps(rank, torch.ones(4, 2))
    said = what_rank_1_is_told_to_do(rank, lambda: Slow.apply(layer(next(batches))).sum().backward())
    assert "rank 1 (host" in said and "in the backward pass at step 4" in said, said


@case(2)
def a_forked_child_has_no_group(rank, world):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = raises(lambda: dist.all_reduce(torch.ones(1)))
        os.write(writer, str(error).encode())
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert b"a group does not survive a fork" in os.read(reader, 4096)
    dist.barrier()


def exits(body, world=2):
    """What ranks print that run a program of their own to its end."""
    port = free_port()
    head = f"""
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("paceline", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size={world})
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(head + body)
        program.flush()
        ranks = [
            subprocess.Popen([sys.executable, program.name, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(world)
        ]
        return [(process.communicate(timeout=60)[1], process.returncode) for process in ranks]


def an_exit_with_work_on_its_way_is_clean():
    ended = exits("""
for _ in range(3):
    dist.all_reduce(torch.ones(1 << 20), async_op=True)
if rank == 0:
    work = dist.irecv(torch.zeros(1 << 20), 1)
    future = work.get_future()
""")
    for text, code in ended:
        assert code == 0, (text, code)


def an_exception_at_the_end_of_a_program_reaches_the_others():
    (own, _), (other, code) = exits("""
if rank == 0:
    raise ValueError("no such file")
dist.all_reduce(torch.ones(1))
""")
    assert "ValueError: no such file" in own
    assert code == 1 and "rank 0 gave up: ValueError: no such file" in other, other


def an_older_torch_is_refused():
    program = """
import torch
torch.__version__ = "2.5.1+cpu"
import paceline.torch
"""
    # Without it, an older torch would import the package before its version is another one.
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1 and "ImportError: paceline.torch needs PyTorch 2.6 or newer, and this is 2.5.1+cpu" in ended.stderr, ended.stderr


def main():
    alone = [an_exit_with_work_on_its_way_is_clean, an_exception_at_the_end_of_a_program_reaches_the_others, an_older_torch_is_refused]
    tests = [(f"{function.__name__} ({world} ranks)", lambda c=c: run(*c)) for c in CASES for function, world in [c[:2]]]
    tests += [(function.__name__, function) for function in alone]
    run_named(tests)


if __name__ == "__main__":
    main()
