"""Real processes on one machine: servers and workers over shared memory, and Hogwild! without a server."""

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.processes.hogwild import hogwild
from gradwire.asynchronous.processes.running import JobOutcome, RunningProcesses, RunningServers, run, run_servers
from gradwire.asynchronous.several.outcome import ServersOutcome

__all__ = [
    "Job",
    "JobOutcome",
    "RunningProcesses",
    "RunningServers",
    "ServersOutcome",
    "hogwild",
    "run",
    "run_servers",
]
