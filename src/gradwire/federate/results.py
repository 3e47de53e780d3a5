"""What a federation's run came to, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gradwire.compare.results import Amount, Measurement, Positive, ResultsError, Whole
from gradwire.compare.storage import plain, read_checked, read_json
from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import checked, facts
from gradwire.federated import Round

KIND, SCHEMA = "federation", 1


@dataclass(frozen=True)
class FederationEvaluation:
    """The metric on held-out data after so many rounds, with the bytes that all clients sent and received by then."""

    rounds: Whole
    value: Measurement
    sent_bytes: Whole
    received_bytes: Whole


@dataclass(frozen=True)
class Own:
    """A client at the end.

    Attributes:
        client: its number.
        examples: how many it has.
        labels: how many different labels those have; None where they have none.
        rounds: how many it took part in.
        sent_bytes: in all of them.
        loss: of the final model on its own examples.
        accuracy: likewise, in percent; None where there are no labels.
    """

    client: Whole
    examples: Whole
    labels: Whole | None
    rounds: Whole
    sent_bytes: Whole
    loss: Measurement
    accuracy: Measurement | None


@dataclass
class Results:
    """What a run came to; `failures` are the rounds that had to be drawn anew, each with its reason.

    `privacy` says in a sentence what a private mean hides; it is None under any other aggregation.
    """

    task: dict[str, Any]
    options: dict[str, Any]
    environment: dict[str, Any]
    rounds: list[Round]
    failures: list[str]
    evaluations: list[FederationEvaluation]
    clients: list[Own]
    seconds: Amount = 0.0
    privacy: str | None = None
    schema: Positive = SCHEMA


# -------------------------------------------------------------------------------------------- reading


ROUND = facts({
    "number": Whole, "clients": tuple[Whole, ...], "dropped": dict[int, str], "loss": Measurement,
    "sent_bytes": dict[int, Whole], "received_bytes": dict[int, Whole],
})  # fmt: skip

FACTS = facts({
    "task": facts({"name": str, "description": str, "metric_name": str, "higher_is_better": bool}),
    "options": facts({
        "clients": Positive, "sample": Positive, "partition": str, "method": str, "update": str, "aggregate": str,
    }),
    "rounds": list[ROUND], "seconds": Amount,
})  # fmt: skip
"""What `Results` leave open: reports need some facts, and the others are kept as they are."""


def is_federation(path: Path) -> bool:
    """Whether a results file is that of a federation; what cannot be read is none."""
    try:
        data = read_json(path)
    except (ResultsError, FileNotFoundError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND  # pyright: ignore[reportUnknownMemberType]


def save(results: Results, path: Path) -> None:
    """Write `results.json` as a whole."""
    write_atomically(path, json.dumps(plain({"kind": KIND, **dataclasses.asdict(results)}), indent=1))


def load(path: Path) -> Results:
    """Read `results.json`.

    Raises:
        ResultsError: it is damaged, or a newer gradwire wrote it.
        OSError: it cannot be read.
    """
    try:
        data, found = read_checked(path, FACTS, SCHEMA)
        results = checked({**data, "rounds": []}, Results, "results", ResultsError)
        results.rounds = [Round(**msgspec.structs.asdict(one)) for one in found.rounds]
        if not results.evaluations:
            raise ResultsError("results.evaluations is empty")
    except ResultsError as error:
        raise ResultsError(f"{path} cannot be used: {error}") from error
    return results
