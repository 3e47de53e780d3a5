"""Ranks whose process group ends before Python does.

Gloo's threads may be the last that hold what belongs to a collective, such as the context of the backward pass that
began it, and take Python's lock to let go of it. One that waits for the lock when Python ends is ended there, within a
destructor, and that ends the process: "terminate called without an active exception". The threads are joined with the
last reference to their group, and `destroy_process_group` lets go of PyTorch's own alone.
"""

from __future__ import annotations

import gc
import importlib

import torch.distributed as dist


def before_init() -> None:
    """Call this before there is a default group, which nothing but its users holds then.

    Functions of this module have the default group for the default of an argument, if there is one when it is imported,
    and whatever makes a first DDP model imports it.
    """
    importlib.import_module("torch.distributed.nn")


def destroy() -> None:
    """Destroy the default group, and wait for its threads where no name is left for it or for a model of DDP."""
    gc.collect()  # a DDP model lies in a cycle and holds its group
    dist.destroy_process_group()
