"""Parameters over several servers: each keeps a part, and a worker computes once it has a grant of each."""

from gradwire.asynchronous.several.client import Line, WorkerClient
from gradwire.asynchronous.several.cut import named_parts, server_of
from gradwire.asynchronous.several.journal import Journal, JournalRow
from gradwire.asynchronous.several.messages import Ask, Asked, Said, ServerAnswer
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.part_server import PartServer, Status
from gradwire.asynchronous.several.worker import PartedWorker

__all__ = [
    "Ask",
    "Asked",
    "Journal",
    "JournalRow",
    "Line",
    "PartServer",
    "PartedWorker",
    "Said",
    "ServerAnswer",
    "ServersOutcome",
    "Status",
    "WorkerClient",
    "named_parts",
    "server_of",
]
