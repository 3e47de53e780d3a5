"""Parameters over several servers: each keeps a part, and a worker computes once it has a grant of each."""

from gradwire.asynchronous.several.client import WorkerClient
from gradwire.asynchronous.several.cut import named_parts, server_of
from gradwire.asynchronous.several.journal import Journal, JournalRow
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.running import RunningJob
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.asynchronous.several.worker import PartedWorker

__all__ = [
    "Journal",
    "JournalRow",
    "PartServer",
    "PartedWorker",
    "RunningJob",
    "ServerWatch",
    "ServersOutcome",
    "WorkerClient",
    "named_parts",
    "server_of",
]
