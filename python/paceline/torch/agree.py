"""What must be the same on all ranks for the same bits: what is refused, and what the ranks compare."""

import ctypes
import hashlib
import warnings
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel


def refuse(model):
    """Refuses models of which a rank has only a part, or that talk to other ranks themselves."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise TypeError(f"the model is a {kind}, in whose place SameBits averages gradients; give it the module inside")
        if _is(module, "FullyShardedDataParallel"):
            raise TypeError(f"{name or 'the model'} is a {kind}; SameBits needs the whole model on every rank")
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise TypeError(f"{name} is a {kind}, whose sums depend on the number of ranks; use BatchNorm, which sees one shard at a time")
    for name, parameter in model.named_parameters():
        if _is(parameter, "DTensor"):
            raise TypeError(f"{name} is divided among the ranks (a DTensor); SameBits needs the whole model on every rank")
        if torch.nn.parameter.is_lazy(parameter):
            raise TypeError(f"{name} has no shape yet; run the model on a batch first")
        if parameter.device.type != "cpu":
            raise TypeError(f"{name} is on {parameter.device}; SameBits is for models on CPUs so far")


def refuse_part(name, part):
    """Refuses what a replacement cannot take over from another rank."""
    if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
        raise TypeError(f"{name} is a {type(part).__name__}, which has no state_dict and load_state_dict; a replacement could not get it")
    if _is(part, "ZeroRedundancyOptimizer"):
        raise TypeError(f"{name} is a ZeroRedundancyOptimizer: what a lost rank has of its state is lost; use the optimizer inside it")


def _is(thing, kind):
    """Whether it is of a class with that name: importing DTensor takes seconds."""
    return any(base.__name__ == kind for base in type(thing).__mro__)


def warn():
    """Warns of settings with which a computation may not give the same bits twice."""
    threads = torch.get_num_threads()
    if threads > 1:
        words = f"torch computes with {threads} threads here, and other numbers of threads give other bits: "
        words += "call torch.set_num_threads(1), or set OMP_NUM_THREADS=1, to get the same bits with any number of ranks on a machine"
        if not torch.are_deterministic_algorithms_enabled():
            words += "; some operations differ even from run to run, unless torch.use_deterministic_algorithms(True) refuses them"
        warnings.warn(words, stacklevel=3)


def kernels():
    """What decides which bits an operation gives, in words."""
    return {
        "torch version": str(torch.__version__),
        "torch threads": torch.get_num_threads(),
        "kind of CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "oneMKL": torch.backends.mkl.is_available(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "bits of small operations": _probe(),
    }


def compare(facts, group):
    """Raises ValueError on all ranks if they differ in one of ``facts``."""
    if group is None:
        return
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    refuse_differences(dict(enumerate(everyone)))


def refuse_differences(facts):
    """Raises ValueError if ranks differ in their facts, which are given by rank."""
    (first_rank, first), *others = facts.items()
    for name, value in first.items():
        for rank, other in others:
            if other[name] != value:
                hint = "; call torch.set_num_threads(1) on all of them" if name == "torch threads" else ""
                raise ValueError(f"ranks differ in {name}: rank {first_rank} has {value}, rank {rank} has {other[name]}{hint}")


def structure(model):
    """A digest of the names, shapes and types of a model's tensors."""
    return hashlib.sha256(repr([(name, *_kind(tensor)) for name, tensor in _tensors(model)]).encode()).hexdigest()[:16]


def weights_hash(model):
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers, as hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(model):
        digest.update(repr((name, *_kind(tensor))).encode())
        _add(digest, tensor)
    return digest.hexdigest()


def fingerprint(model, turn):
    """A check number of all tensors of a model at turn 0, and later of the beginning of one of them in turn: 64 KiB at most."""
    tensors = [tensor.detach() for _, tensor in _tensors(model)]
    if turn and tensors:
        tensors = [tensors[turn % len(tensors)].flatten()[:8192]]
    check = 0
    for tensor in tensors:
        tensor = tensor.contiguous()
        check = zlib.crc32(bytes_of(tensor), check)
    return check


def _tensors(model):
    return sorted([*model.named_parameters(), *model.named_buffers()])


def _kind(tensor):
    return str(tensor.dtype), tuple(tensor.shape)


def _add(digest, tensor):
    tensor = tensor.detach().cpu().contiguous()
    digest.update(bytes_of(tensor))


def bytes_of(tensor):
    """The memory of a contiguous tensor, which must live as long."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _probe():
    """A digest of operations whose kernels depend on the processor and on the libraries below torch."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with torch.enable_grad():
        image, kernel = numbers(2, 8, 13, 13).requires_grad_(), numbers(24, 8, 3, 3).requires_grad_()
        left, right = numbers(65, 130).requires_grad_(), numbers(130, 97)
        results = [F.conv2d(image, kernel, padding=1), F.gelu(left @ right), F.softmax(left, 1), F.layer_norm(left, (130,)), left.exp().sum(), left.tanh()]
        results += [F.scaled_dot_product_attention(*(numbers(1, 2, 17, 16) for _ in range(3))), left.bfloat16() @ right.bfloat16()]
        sum(result.float().pow(2).mean() for result in results).backward()
    digest = hashlib.sha256()
    for tensor in [*results, image.grad, kernel.grad, left.grad]:
        _add(digest, tensor)
    return digest.hexdigest()[:16]
