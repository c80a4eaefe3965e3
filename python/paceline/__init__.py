"""Paceline: distributed training that gives the same bits on any number of ranks.

This package has the program ``paceline``, which launches and watches jobs, and the backend ``paceline`` of ``torch.distributed``, which
needs no import: ``torch.distributed.init_process_group("paceline")``. :func:`track` says what a script has used. Importing the package does not
import torch.
"""

import os
import shutil
import sysconfig

from paceline import _library
from paceline._tracker import Usage, track

__all__ = ["Usage", "__version__", "program", "track"]

__version__ = _library.version()


def program() -> str:
    """The path of the program ``paceline`` that was installed with this package, or else of the first one on the PATH.

    Raises FileNotFoundError if there is none.
    """
    own = os.path.join(sysconfig.get_path("scripts"), "paceline")
    found = own if os.access(own, os.X_OK) else shutil.which("paceline")
    if found is None:
        raise FileNotFoundError(
            f"there is no program paceline: neither {own} nor on the PATH; install it with `cargo install --path crates/paceline`"
        )
    return found
