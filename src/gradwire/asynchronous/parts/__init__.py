"""Parameters over several servers: each keeps a part, and a worker computes once it has a grant of each."""

from gradwire.asynchronous.parts.client import Client, Line
from gradwire.asynchronous.parts.cut import Parts, part_seed, server_of
from gradwire.asynchronous.parts.desk import Desk, Status
from gradwire.asynchronous.parts.journal import Journal, Row
from gradwire.asynchronous.parts.messages import Answer, Ask, Asked, Said
from gradwire.asynchronous.parts.outcome import Outcome
from gradwire.asynchronous.parts.worker import PartedWorker

__all__ = [
    "Answer",
    "Ask",
    "Asked",
    "Client",
    "Desk",
    "Journal",
    "Line",
    "Outcome",
    "PartedWorker",
    "Parts",
    "Row",
    "Said",
    "Status",
    "part_seed",
    "server_of",
]
