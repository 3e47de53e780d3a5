"""One rank of `run_function`: meet the others, call the function, write down what it returns."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.kernels.warm import prepare_to_load
from gradwire.network.wire import WireMeter
from gradwire.ranks import group_end, moment

_AFTER_DEADLINE_S = 30.0
"""A collective may wait so much longer than the deadline: a rank that is asked where it stands must still be there."""


def load(target: str) -> Callable[..., Any]:
    """Return the function named by "package.module:function" or "path/to/file.py:function"."""
    where, _, name = target.rpartition(":")
    if not where:
        raise ValueError(f'target {target!r} must read "module:function" or "file.py:function"')
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return getattr(module, name)


def prepare() -> None:
    """Get a warm process ready: import what most functions need. Starts no thread.

    This takes three seconds more than importing PyTorch alone. Each forked rank saves them.
    """
    torch.set_num_threads(1)
    importlib.import_module("torch.nn.parallel")
    importlib.import_module("torch._dynamo")  # the first step of an optimizer would, which takes a second
    gradwire = importlib.import_module("gradwire")  # by name: ranks know nothing of what they run
    for name in gradwire.__all__:  # each is imported when it is first used
        getattr(gradwire, name)
    prepare_to_load()
    gc.freeze()  # a child that collects garbage would copy every page of what is here


def _stay_at_sigterm() -> None:
    """Let SIGTERM, which comes after the deadline, only write where every thread is, and let it end what is forked.

    A rank that ended by it would close its connections. Others would tell of these, and not of where they stood.
    SIGKILL ends all ranks a moment later. A function may still set a handler of its own.
    """
    faulthandler.register(signal.SIGTERM, chain=False)
    # A forked process has this handler until it can remove it. A SIGTERM that comes so early has to wait for that.
    forking = threading.local()

    def before() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def after_in_child() -> None:
        faulthandler.unregister(signal.SIGTERM)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def main(target: str, args: str, result: str, deadline_s: str) -> None:
    """Run one rank; where and who it is stands in the environment."""
    faulthandler.enable()  # what ends the process by a fault leaves in its log where every thread was
    _stay_at_sigterm()
    torch.set_num_threads(1)
    function = load(target)
    group_end.before_init()
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(deadline_s) + _AFTER_DEADLINE_S))
    WireMeter.from_environment().pace()
    value = function(dist.get_rank(), dist.get_world_size(), **json.loads(args))
    Path(result).write_text(json.dumps(value))
    group_end.destroy()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        moment.note()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for peers that wait for us
