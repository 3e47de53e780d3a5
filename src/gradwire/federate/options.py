"""The options of `gradwire federate`. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradwire.option_fields import AtLeast, Positive, option

TRAINED, CLIENTS, SENT = "what to train", "the clients", "what is sent"
COUNT = AtLeast(1, most=10**9)


@dataclass(frozen=True)
class FederateOptions:
    """What to train, with whom, and how. Each field says what it is, and `gradwire federate --help` shows it.

    >>> FederateOptions(clients=20, rounds=5).partition
    'dirichlet:0.3'
    """

    task: str = option("digits", "as in compare", group=TRAINED, metavar="TASK")
    text: Path | None = option(
        None, "folder of text for the bytes task", group=TRAINED, metavar="FOLDER", unset="Python's standard library"
    )
    rounds: int = option(50, "how many", group=TRAINED, metavar="N", limits=COUNT)
    method: str = option("fedavg", "what clients and the server compute", group=TRAINED, metavar="METHOD")
    seed: int = option(0, "of all that is drawn", group=TRAINED, metavar="N")
    clients: int = option(100, "how many", group=CLIENTS, metavar="N", limits=COUNT)
    sample: int = option(10, "of a round", group=CLIENTS, metavar="N", limits=COUNT)
    sampling: Literal["fixed", "poisson"] = option(
        "fixed", "draw so many at once, or each client by itself so that so many are expected", group=CLIENTS
    )
    partition: str = option("dirichlet:0.3", "of the data", group=CLIENTS, metavar="PARTITION")
    lr: float = option(0.1, "of local steps", group=CLIENTS, metavar="LR")
    momentum: float = option(0.0, "of local steps", group=CLIENTS, metavar="M")
    epochs: int = option(5, "over own data in a round", group=CLIENTS, metavar="N", limits=COUNT)
    batch: int = option(10, "examples of a local step", group=CLIENTS, metavar="N", limits=COUNT)
    drop: float = option(0.0, "probability of being lost", group=CLIENTS, metavar="P")
    slow: float = option(0.0, "probability of making fewer local steps", group=CLIENTS, metavar="P")
    update: str = option("none", "how clients' updates travel", group=SENT, metavar="SPEC")
    broadcast: str = option("none", "how the server's changes travel", group=SENT, metavar="SPEC")
    aggregate: str = option("mean", "what updates become", group=SENT, metavar="RULE")
    quorum: int | None = option(
        None,
        "updates a round needs",
        group=SENT,
        metavar="N",
        unset="1; with dp a round needs none, and this is refused",
    )
    delta: float = option(
        1e-5, "with dp, tell epsilon for this delta", group=SENT, metavar="DELTA", limits=Positive(most=1)
    )
    out: Path = option(Path("federate-report"), "output folder", group=SENT, metavar="DIR")
