"""Servers and workers as actors of Ray, on one machine or on a cluster."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.ray_actors.running import Running, run
from gradwire.asynchronous.several.outcome import Outcome

__all__ = ["Job", "Outcome", "Running", "run"]
