"""The process group: torch's operations as calls of the library.

It is a ``ProcessGroup`` and no ``Backend``: torch hands works of the latter on without ``is_completed`` and the source of a receive, and
older versions do not let Python implement it. torch creates no further backends beside such a group. So ``cpu:paceline,cuda:nccl`` has them
created here, when the first tensor of their device comes.
"""

import atexit
import ctypes
import functools
import json
import os
import sys
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import _library as library
from paceline.torch import phase, work
from paceline.torch.error import CollectiveError

_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_DTYPES = {dtype: number for number, dtype in enumerate(_NUMBERS)}
# Sums of complex numbers are those of their parts; torch refuses other reductions.
_DTYPES |= {torch.complex128: _DTYPES[torch.float64], torch.complex64: _DTYPES[torch.float32]}
_BYTES = _DTYPES[torch.uint8]
_WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
_REDUCTIONS = {
    getattr(dist.ReduceOp, name): number
    for number, name in enumerate(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"))
}
_MILLISECOND = timedelta(milliseconds=1)
# Groups have torch's timeouts, which the library's advice does not know.
_LONGER = "give init_process_group, new_group or the call a longer timeout"

# Variables that describe a rank of a launcher's job; those of another rank or job must not be believed.
_OF_A_LAUNCHER = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "PACELINE_LOCAL_RANK",
    "PACELINE_LOCAL_CORES",
    "PACELINE_REPLACEMENT",
    "PACELINE_STORE",
    "PACELINE_PAGE_FD",
)

_groups = weakref.WeakSet()


class _Elsewhere(Exception):
    """A tensor is on another device than the CPU."""

    def __init__(self, device):
        self.device = device


def _operation(method):
    """An operation whose tensors may be on a device that another backend serves."""

    @functools.wraps(method)
    def operation(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except _Elsewhere as elsewhere:
            device = elsewhere.device
        return getattr(self._group_on(device), method.__name__)(*args, **kwargs)

    return operation


class _Memory:
    """The tensors of one call as the library takes them."""

    def __init__(self, moves=False):
        self.moves = moves  # numbers are only moved, so their type does not matter
        self.dtype = None
        self.tensors = []
        self.written = []
        self.landings = []

    def flat(self, tensor, writes=False):
        """A contiguous tensor with the same numbers, which lands in ``tensor`` afterwards if it is another one."""
        if tensor.device.type != "cpu":
            raise _Elsewhere(tensor.device)
        if tensor.layout is not torch.strided:
            raise TypeError(f"paceline takes dense tensors, and this one is {tensor.layout}")
        dtype = _DTYPES.get(tensor.dtype)
        if self.moves and (dtype is None or tensor.dtype is torch.bool):
            dtype = _BYTES
        if dtype is None:
            raise TypeError(f"paceline cannot reduce {tensor.dtype}; it can: {', '.join(map(str, _DTYPES))}")
        if dtype != self.dtype:
            if self.dtype is not None:
                raise TypeError("the tensors of an operation must have one dtype")
            self.dtype = dtype
        # Each of them is the tensor itself if there is nothing to do.
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        self.tensors.append(flat)
        if writes:
            self.written.append(flat)
            if flat is not tensor:
                self.landings.append(functools.partial(tensor.detach().copy_, flat))
        return flat

    def average(self, world):
        """Makes whole numbers' averages of their sums, rounded towards zero as NCCL's are."""
        self.landings[:0] = [functools.partial(flat.detach().div_, world, rounding_mode="trunc") for flat in self.written]

    def reads(self, tensors):
        return [(flat.data_ptr(), flat.nbytes) for flat in map(self.flat, tensors)]

    def writes(self, tensors):
        return [(flat.data_ptr(), flat.nbytes) for flat in (self.flat(tensor, True) for tensor in tensors)]


def _cut(tensor, world, splits=None):
    """The parts of a contiguous tensor for each rank: equal ones, or by numbers of rows."""
    start, whole = tensor.data_ptr(), tensor.nbytes
    if not splits:
        if tensor.numel() % world:
            raise ValueError(f"a tensor of {tensor.numel()} elements cannot be cut in {world} equal parts")
        return [(start + rank * (whole // world), whole // world) for rank in range(world)]
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(splits) != world or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"split sizes {list(splits)} do not cut {rows} rows in {world} parts")
    row = whole // rows if rows else 0
    parts = []
    for split in splits:
        parts.append((start, split * row))
        start += split * row
    return parts


def _spans(parts):
    return (library.Span * len(parts))(*parts) if parts else None


class _Devices(list):
    """The devices of a group. torch's flight recorder, which would look for a backend in C++, leaves out a group without any."""

    def __bool__(self):
        return False


class Group(dist.ProcessGroup):
    """Ranks that are connected by Paceline. torch makes one for ``backend="paceline"``."""

    def __init__(self, options, parent=None):
        """``parent`` is the group that this one is split from."""
        rank, world = options.group_rank, options.group_size
        # Not with the store: torch 2.9 refuses to make a subclass so.
        super().__init__(rank, world)
        self._options = options
        self._rank, self._world = rank, world
        self._is_live = False
        self._ranks = list(options.global_ranks_in_group) or list(range(world))
        self._name, self._description = options.group_id, "undefined"
        self._others = {}
        self._handle = None
        if any(group._is_live and group._handle is not None for group in _groups):
            raise RuntimeError("a job that recovers live has one group of all ranks: make no others after SameBits.recover_live")
        try:
            self._handle = self._form(options, parent)
            _groups.add(self)
            if not options.global_ranks_in_group:
                phase.tell(self._handle)
        except library.Failure as failure:
            raise self._error(failure.report) from None

    def _form(self, options, parent):
        timeout_ms = max(1, options.timeout // _MILLISECOND)
        default = dist.group.WORLD
        if parent is None and options.global_ranks_in_group and isinstance(default, Group):
            parent = default
        if parent is not None:
            members = [parent._ranks.index(rank) for rank in self._ranks]
            return library.subgroup(parent._handle, options.group_id, members, timeout_ms)
        variables = _variables(options)
        settings = {"variables": variables, "timeout_ms": timeout_ms, "meeting": None}
        if self._world == 1 or variables.get("PACELINE_STORE", os.environ.get("PACELINE_STORE")):
            return library.join(settings, 0)
        # A group of the same name may have met in this store before.
        meetings = options.store.add(f"paceline/{options.group_rank}", 1)
        key, server = f"paceline/meeting/{meetings}", 0
        if options.group_rank == 0:
            try:
                server, settings["meeting"] = library.host(settings)
            except library.Failure as failure:
                options.store.set(key, json.dumps({"failed": str(failure)}))
                raise
            options.store.set(key, json.dumps(settings["meeting"]))
        else:
            settings["meeting"] = meeting = json.loads(options.store.get(key))
            if "failed" in meeting:
                message = f"rank 0 could not host the group's store: {meeting['failed']}"
                raise library.Failure(library.report("other", message, [0]))
        return library.join(settings, server)

    def _error(self, report):
        if report["hint"]:
            report["hint"] = report["hint"].replace("raise PACELINE_TIMEOUT_SECONDS", _LONGER)
        return CollectiveError(report, self._ranks, self._ranks[self.rank()])

    # Live recovery.

    def go_live(self, admits):
        """Says that the program goes on with :meth:`succeed` when ranks are lost, and whether it takes in replacements; False where no launcher
        recovers live. After that there can be no other groups."""
        if self._is_live:
            raise RuntimeError("a job has one SameBits that recovers live, and this program has called recover_live before")
        if any(group is not self and group._handle is not None for group in _groups):
            raise RuntimeError("live recovery needs the group of all ranks to be the only one, and this program has made others")
        if set(self._backends()) - {"cpu"}:
            raise RuntimeError(f"live recovery is for tensors on CPUs, and this group has other backends: {self._backends()}")
        if not library.declare(self._handle, library.RECOVERS):
            return False
        if admits:
            library.declare(self._handle, library.ADMITS)
        self._is_live = True
        return True

    def outlook(self):
        """``library.IN_ORDER``, ``LOST``, ``INVITED`` or ``JOINING``."""
        return library.IN_ORDER if self._handle is None else library.outlook(self._handle)

    def declare_joined(self):
        library.declare(self._handle, library.JOINED)

    def wait_while_held(self):
        library.wait_while_held(self._handle)

    def succeed(self):
        """Becomes the next generation: the ranks that are left, numbered anew, or all with their replacements."""
        before = self._handle
        try:
            self._handle, place = library.next_generation(before)
            phase.follow(before, self._handle)
        except library.Failure as failure:
            raise self._error(failure.report) from None
        library.close(before)
        self._rank, self._world = place["rank"], place["world"]
        self._ranks = list(range(self._world))
        dist.distributed_c10d._world.pg_group_ranks[self] = {rank: rank for rank in self._ranks}

    def settle(self, place, completed):
        """What holds in this generation, see ``paceline_settle``. All its ranks call it before anything else."""
        try:
            return library.settle(self._handle, place, completed)
        except library.Failure as failure:
            raise self._error(failure.report) from None

    # What torch asks of a group.

    def rank(self):
        return self._rank

    def size(self):
        return self._world

    def getBackendName(self):
        return "paceline"

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._description

    def _set_group_desc(self, description):
        self._description = description

    _set_group_name = setGroupName
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self):
        """Those whose backends have been made."""
        return _Devices(torch.device(device) for device in ("cpu", *self._others))

    def _get_backend(self, device):
        """torch asks a device's backend what it can do beside operations: be split, here."""
        device = torch.device(device)
        return self._group_on(device)._get_backend(device) if device.type != "cpu" and self._backends() else self

    get_backend = _get_backend

    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_window = _supports_time_estimate = False

    def eager_connect_single_device(self, device):
        """torch connects groups that can be split at once if it is given a device. This one is connected when it is made."""

    def split_group(self, ranks, timeout, opts, group_name, group_desc, **_):
        """A group of some of this one's ranks, in this order; None on the others. All ranks call it, but only the members wait."""
        if self.rank() not in ranks:
            return None
        if self._handle is None:
            raise self._error(library.report("handle", "the group has been destroyed"))
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = dist.PrefixStore(f"{group_name}/", self._options.store)
        options.group_rank, options.group_size = ranks.index(self.rank()), len(ranks)
        options.timeout = timeout
        options.group_id, options.global_ranks_in_group = group_name, [self._ranks[rank] for rank in ranks]
        options.process_group = self
        group = Group(options, self)
        group._set_group_desc(group_desc or "undefined")
        return group

    def set_timeout(self, timeout):
        if self._handle is not None:
            library.set_timeout(self._handle, max(1, timeout // _MILLISECOND))
        for other in self._others.values():
            other.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self):
        if self._handle is not None:
            library.abort(self._handle, "its program aborted the group")
        for other in self._others.values():
            other.abort()

    def shutdown(self):
        self._close("")
        for other in self._others.values():
            if hasattr(other, "shutdown"):
                other.shutdown()
            else:  # in torch 2.6
                dist.distributed_c10d._shutdown_backend(other)

    def _close(self, why):
        handle, self._handle = self._handle, None
        if handle is not None:
            phase.stop(handle)
            try:
                library.close(handle, why)
            except library.Failure:
                pass  # a forked child has only its parent's number

    def __del__(self):
        if getattr(self, "_handle", None) is not None:
            self._close("")

    # Tensors on other devices.

    def _backends(self):
        """The backend of each device type, as the user named them; none until torch has registered the group."""
        named = dist.distributed_c10d._world.pg_backend_config.get(self)
        return dict(pair.split(":") for pair in str(named).split(",")) if named else {}

    def _group_on(self, device):
        """A group of the same ranks by the backend that the user named for a device."""
        if device.type not in self._others:
            name = self._backends().get(device.type)
            if name is None:
                raise RuntimeError(
                    f"this group has tensors on the CPU only, and one is on {device}; give the device a backend too, as in "
                    f'init_process_group("cpu:paceline,{device.type}:nccl")'
                )
            self._others[device.type] = self._make(device.type, name)
        return self._others[device.type]

    def _make(self, device, name):
        options, own = dist.distributed_c10d._DistributedBackendOptions(), self._options
        options.store = dist.PrefixStore(f"{device}/", own.store)
        for part in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
            setattr(options, part, getattr(own, part))
        if hasattr(options, "process_group"):  # torch 2.9 has none
            options.process_group = self
        plugin = dist.Backend._plugins[name.upper()]
        made = (
            plugin.creator_fn(options, None)
            if plugin.extended_api
            else plugin.creator_fn(options.store, own.group_rank, own.group_size, own.timeout)
        )
        if isinstance(made, dist.ProcessGroup):
            return made
        group = dist.ProcessGroup(options.store, own.group_rank, own.group_size)
        kind = dist.Backend.backend_type_map[name]
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, made)
        return group

    # Calls.

    def _start(self, calls, opts, result, memories):
        """Puts calls on their way, or does them at once where torch waits anyway."""
        if self._handle is None:
            raise self._error(library.report("handle", "the group has been destroyed"))
        work.sweep()
        tensors = [memory.tensors for memory in memories]
        landings = [landing for memory in memories for landing in memory.landings]
        handles, handle, source, error = (), ctypes.c_uint64(), ctypes.c_int64(-1), None
        for call in calls:
            if not getattr(opts, "asyncOp", True):
                status = library.run(self._handle, call, source)
            elif (status := library.submit(self._handle, call, handle)) == library.OK:
                handles += (handle.value,)
            if status != library.OK:
                error = self._error(library.text())
                break
        started = work.Work(self, handles, tensors, landings if error is None else [], result)
        if error is not None:
            raise error  # the work keeps what earlier calls use
        return started

    def _call(self, kind, memory, reads, writes, opts=None, peer=-1, tag=0):
        timeout = getattr(opts, "timeout", None)
        reduction, factor = 0, 0.0
        if hasattr(opts, "reduceOp"):
            op = opts.reduceOp
            op = op.op if isinstance(op, dist.ReduceOp) else op
            if op not in _REDUCTIONS:
                raise ValueError(f"paceline cannot reduce by {opts.reduceOp}")
            reduction = _REDUCTIONS[op]
            factor = float(opts.reduceOp.factor) if op == dist.ReduceOp.PREMUL_SUM else 0.0
            if op == dist.ReduceOp.AVG and memory.tensors and memory.tensors[0].dtype in _WHOLE:
                reduction = _REDUCTIONS[dist.ReduceOp.SUM]
                if peer in (-1, self.rank()):
                    memory.average(self._world)
        return library.Call(
            kind,
            memory.dtype or 0,
            reduction,
            tag,
            peer,
            factor,
            max(0, timeout // _MILLISECOND) if timeout is not None else 0,
            _spans(reads),
            len(reads),
            _spans(writes),
            len(writes),
        )

    def _one(self, kind, memory, reads, writes, opts, result, **more):
        return self._start([self._call(kind, memory, reads, writes, opts, **more)], opts, result, [memory])

    def _gather_all(self, outputs, inputs, opts, result):
        """An all-gather for each input: ``outputs`` has the tensors of all ranks, or one for all."""
        memories = [_Memory(moves=True) for _ in inputs]
        calls = []
        for memory, output, input in zip(memories, outputs, inputs, strict=True):
            reads = memory.reads([input])
            writes = memory.writes(output) if isinstance(output, list) else _cut(memory.flat(output, True), self._world)
            calls.append(self._call(library.ALL_GATHER, memory, reads, writes, opts))
        return self._start(calls, opts, result, memories)

    def _scatter_sums(self, outputs, inputs, opts):
        """A reduce-scatter for each output: ``inputs`` has the tensors for all ranks, or one for all."""
        memories = [_Memory() for _ in outputs]
        calls = []
        for memory, output, input in zip(memories, outputs, inputs, strict=True):
            reads = memory.reads(input) if isinstance(input, list) else _cut(memory.flat(input), self._world)
            calls.append(self._call(library.REDUCE_SCATTER, memory, reads, memory.writes([output]), opts))
        return self._start(calls, opts, outputs, memories)

    def _all_reduce(self, tensors, opts):
        if any(tensor.is_sparse for tensor in tensors):
            for tensor in tensors:
                self._sum_sparse(tensor, opts)
            return self._start([], opts, tensors, [])
        memory = _Memory()
        return self._one(library.ALL_REDUCE, memory, [], memory.writes(tensors), opts, tensors)

    def _sum_sparse(self, tensor, opts):
        """The sum of sparse tensors, done when this returns: torch adds the entries of all ranks, one rank after another."""
        if tensor.device.type != "cpu":
            raise _Elsewhere(tensor.device)
        if not tensor.is_sparse or getattr(opts, "reduceOp", dist.ReduceOp.SUM) != dist.ReduceOp.SUM:
            raise TypeError("paceline can only add sparse tensors, and none that are dense with them")
        own = tensor.detach().coalesce()
        places, entries = own.indices(), own.values()
        counts = torch.empty(self._world, dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([places.shape[1]])).wait()
        counts = counts.tolist()
        all_places = [places.new_empty(count, places.shape[0]) for count in counts]
        all_entries = [entries.new_empty(count, *entries.shape[1:]) for count in counts]
        self.alltoall(all_places, [places.t().contiguous()] * self._world).wait()
        self.alltoall(all_entries, [entries] * self._world).wait()
        # Checked, because a rank whose tensor is larger has places beyond this one's.
        total = torch.sparse_coo_tensor(torch.cat(all_places).t(), torch.cat(all_entries), tensor.shape, check_invariants=True)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    def _receive(self, tensors, source, tag):
        memory = _Memory(moves=True)
        return self._one(library.RECV, memory, [], memory.writes(tensors), None, tensors, peer=source, tag=tag)

    @_operation
    def allreduce(self, tensors, opts=None):
        return self._all_reduce(tensors, opts)

    @_operation
    def allreduce_coalesced(self, tensors, opts=None):
        return self._all_reduce(tensors, opts)

    @_operation
    def broadcast(self, tensors, opts):
        memory = _Memory(moves=True)
        return self._one(library.BROADCAST, memory, [], memory.writes(tensors), opts, tensors, peer=opts.rootRank)

    @_operation
    def reduce(self, tensors, opts):
        memory = _Memory()
        return self._one(library.REDUCE, memory, [], memory.writes(tensors), opts, tensors, peer=opts.rootRank)

    @_operation
    def allgather(self, outputs, inputs, opts=None):
        return self._gather_all(outputs, inputs, opts, outputs)

    @_operation
    def allgather_coalesced(self, outputs, inputs, opts=None):
        # The lists are by rank there, and by tensor here.
        by_tensor = [list(tensors) for tensors in zip(*outputs, strict=True)]
        return self._gather_all(by_tensor, inputs, opts, outputs)

    @_operation
    def all_gather_single(self, output, input, opts=None):
        return self._gather_all([output], [input], opts, output)

    @_operation
    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._gather_all(outputs, inputs, opts, outputs)

    @_operation
    def reduce_scatter(self, outputs, inputs, opts=None):
        return self._scatter_sums(outputs, inputs, opts)

    @_operation
    def reduce_scatter_single(self, output, input, opts=None):
        return self._scatter_sums([output], [input], opts)

    @_operation
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self._scatter_sums(outputs, inputs, opts)

    @_operation
    def gather(self, outputs, inputs, opts):
        memory, is_root = _Memory(moves=True), self.rank() == opts.rootRank
        reads, writes = memory.reads(inputs), memory.writes(outputs[0]) if is_root else []
        return self._one(library.GATHER, memory, reads, writes, opts, outputs, peer=opts.rootRank)

    @_operation
    def gather_single(self, output, input, opts):
        memory, is_root = _Memory(moves=True), self.rank() == opts.rootRank
        reads, writes = memory.reads([input]), _cut(memory.flat(output, True), self._world) if is_root else []
        return self._one(library.GATHER, memory, reads, writes, opts, output, peer=opts.rootRank)

    @_operation
    def scatter(self, outputs, inputs, opts):
        memory, is_root = _Memory(moves=True), self.rank() == opts.rootRank
        writes, reads = memory.writes(outputs), memory.reads(inputs[0]) if is_root else []
        return self._one(library.SCATTER, memory, reads, writes, opts, outputs, peer=opts.rootRank)

    @_operation
    def alltoall(self, outputs, inputs, opts=None):
        memory = _Memory(moves=True)
        return self._one(library.ALL_TO_ALL_V, memory, memory.reads(inputs), memory.writes(outputs), opts, outputs)

    @_operation
    def all_to_all_single(self, output, input, output_splits=(), input_splits=(), opts=None):
        memory = _Memory(moves=True)
        kind = library.ALL_TO_ALL_V if output_splits or input_splits else library.ALL_TO_ALL
        reads = _cut(memory.flat(input), self._world, input_splits)
        writes = _cut(memory.flat(output, True), self._world, output_splits)
        return self._one(kind, memory, reads, writes, opts, output)

    @_operation
    def send(self, tensors, to, tag=0):
        memory = _Memory(moves=True)
        return self._one(library.SEND, memory, memory.reads(tensors), [], None, tensors, peer=to, tag=tag)

    @_operation
    def recv(self, tensors, source, tag=0):
        return self._receive(tensors, source, tag)

    @_operation
    def recv_anysource(self, tensors, tag=0):
        return self._receive(tensors, -1, tag)

    @_operation
    def barrier(self, opts=None):
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            raise _Elsewhere(device)
        return self._one(library.BARRIER, _Memory(), [], [], opts, [])

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier whose failure names the ranks that are missing: as every operation's does, but in torch's words too."""
        opts = dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
            if opts.timeout < _MILLISECOND:
                raise self._error(library.report("timeout", f"Rank {self.rank()} timed out in monitoredBarrier after 0 ms"))
        try:
            self.barrier(opts).wait()
        except CollectiveError as error:
            raise self._error({**error.report, "message": f"{error.report['message']}. {self._monitored(error, wait_all_ranks)}"}) from None

    def _monitored(self, error, wait_all_ranks):
        if self.rank() != 0:
            return (
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
                "Please check rank 0 logs for faulty rank."
            )
        missing = sorted(error.report["culprits"])[: None if wait_all_ranks else 1]
        return f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass monitoredBarrier"

    # The names by which torch's C++ code, and older versions, call them.
    recvAnysource = recv_anysource
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single


def create(options, _backend_options=None):
    """Makes a group for torch, which gives the store, the rank and the members."""
    return Group(options)


def _variables(options):
    """The variables of the environment that describe this rank, as far as torch knows them."""
    rank, world, env = str(options.group_rank), str(options.group_size), os.environ
    variables = {"RANK": rank, "WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": ""}
    if (env.get("RANK"), env.get("WORLD_SIZE")) != (rank, world) or "LOCAL_WORLD_SIZE" not in env:
        variables |= dict.fromkeys(_OF_A_LAUNCHER, "")
    if options.global_ranks_in_group:
        variables["TORCHELASTIC_RUN_ID"] = f"{env.get('TORCHELASTIC_RUN_ID', 'none')}/{options.group_id}"
    store = options.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    variables["MASTER_ADDR"] = host or env.get("MASTER_ADDR") or "127.0.0.1"
    variables["MASTER_PORT"] = str(port or env.get("MASTER_PORT") or 29500)
    return variables


def rendezvous_alone(_url, **_options):
    """In place of torch's store, which a lost rank 0 may have hosted: a replacement meets the others in the launcher's."""
    yield dist.HashStore(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _leave():
    """Leaves all groups before the interpreter frees the tensors that they use; after an exception with its words for the other ranks."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    why = "" if error is None else f"{type(error).__name__}: {error}"
    for group in list(_groups):
        group._close(why)
    work.stop()


atexit.register(_leave)
