"""The backend ``paceline`` of ``torch.distributed``, and training with the same bits on any number of ranks.

``torch.distributed.init_process_group("paceline")`` finds it by its entry point; a torch without such entry points imports this module.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from paceline.torch.version import VERSION

if VERSION < (2, 6):
    raise ImportError(f"paceline.torch needs PyTorch 2.6 or newer, and this is {torch.__version__}: older versions were not tried")

from paceline.torch.agree import weights_hash
from paceline.torch.data import Loader, Sampler
from paceline.torch.error import CollectiveError
from paceline.torch.group import Group, create, rendezvous_alone
from paceline.torch.same_bits import SameBits

__all__ = ["CollectiveError", "Group", "Loader", "SameBits", "Sampler", "register", "weights_hash"]


def register() -> None:
    """Registers the backend, unless it is registered already."""
    if "PACELINE" not in dist.Backend._plugins:
        dist.Backend.register_backend("paceline", create, extended_api=True, devices=["cpu"])
        # torch 2.6 shuts down NCCL's groups alone, and so a rank would leave ours only once nothing refers to it.
        if shutdown := getattr(distributed_c10d, "_shutdown_backend", None):
            distributed_c10d._shutdown_backend = lambda group: group.shutdown() if isinstance(group, Group) else shutdown(group)
    if os.environ.get("PACELINE_REPLACEMENT") and os.environ.get("PACELINE_STORE"):
        _rendezvous_handlers["env"] = rendezvous_alone


register()
