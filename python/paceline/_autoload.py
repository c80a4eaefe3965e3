"""What PyTorch calls when it is imported."""

import contextlib


def register():
    """Registers the backend where ``torch.distributed`` does not look for entry points of backends, as in torch 2.9."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
        # Who imports it gets the reason; a program that does not want it goes on.
        with contextlib.suppress(ImportError):
            import paceline.torch  # registers it
