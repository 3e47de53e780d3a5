"""Parameters over several servers: each keeps a part, and a worker computes once it has a grant of each."""

from gradwire.asynchronous.several.client import Client, Line
from gradwire.asynchronous.several.cut import named_parts, server_of
from gradwire.asynchronous.several.desk import Desk, Status
from gradwire.asynchronous.several.journal import Journal, Row
from gradwire.asynchronous.several.messages import Answer, Ask, Asked, Said
from gradwire.asynchronous.several.outcome import Outcome
from gradwire.asynchronous.several.worker import PartedWorker

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
    "Row",
    "Said",
    "Status",
    "named_parts",
    "server_of",
]
