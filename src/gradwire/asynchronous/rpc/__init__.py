"""Servers and workers as processes that `torch.distributed.rpc` joins, on one machine or on several."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.rpc.running import run
from gradwire.asynchronous.several.outcome import Outcome

__all__ = ["Job", "Outcome", "run"]
