"""Servers and workers as processes that `torch.distributed.rpc` joins, on one machine or on several."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.rpc.running import run
from gradwire.asynchronous.several.outcome import ServersOutcome

__all__ = ["Job", "ServersOutcome", "run"]
