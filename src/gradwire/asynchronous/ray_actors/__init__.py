"""Servers and workers as actors of Ray, on one machine or on a cluster."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.ray_actors.running import RunningActors, run
from gradwire.asynchronous.several.outcome import ServersOutcome

__all__ = ["Job", "RunningActors", "ServersOutcome", "run"]
