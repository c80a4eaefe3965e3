"""The version of PyTorch, for what depends on it."""

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
