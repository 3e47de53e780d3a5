"""Real processes on one machine: a server and its workers over shared memory, and Hogwild! without a server."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.processes.hogwild import hogwild
from gradwire.asynchronous.processes.job import JobOutcome
from gradwire.asynchronous.processes.running import RunningProcesses, run

__all__ = ["Job", "JobOutcome", "RunningProcesses", "hogwild", "run"]
