"""Servers and workers as processes that `torch.distributed.rpc` joins, on one machine or on several."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.parts.outcome import Outcome
from gradwire.asynchronous.rpc.running import run

__all__ = ["Job", "Outcome", "run"]
