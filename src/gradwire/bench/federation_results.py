"""What a federation's run came to, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.bench.readers import (
    Read,
    amount,
    facts,
    fields,
    flag,
    listed,
    mapping,
    measured,
    optional,
    text,
    whole,
)
from gradwire.bench.results import ResultsError
from gradwire.bench.storage import plain, read_json, write_atomically
from gradwire.federated import Round

KIND, SCHEMA = "federation", 1


class FederationEvaluation(NamedTuple):
    """The metric on held-out data after so many rounds, with the bytes that all clients sent and received by then."""

    rounds: int
    value: float
    sent_bytes: int
    received_bytes: int


class Own(NamedTuple):
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

    client: int
    examples: int
    labels: int | None
    rounds: int
    sent_bytes: int
    loss: float
    accuracy: float | None


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
    seconds: float = 0.0
    privacy: str | None = None
    schema: int = SCHEMA


# -------------------------------------------------------------------------------------------- reading


def _by_client(read: Read) -> Read:
    """A mapping from clients' numbers, which JSON has as texts."""

    def read_all(value: Any, where: str) -> dict[int, Any]:
        try:
            return {int(client): read(item, f"{where}.{client}") for client, item in mapping(value, where).items()}
        except ValueError as error:
            raise ResultsError(f"{where} should have numbers of clients: {error}") from error

    return read_all


ROUND: Mapping[str, Read] = {
    "number": whole(0), "clients": listed(whole(0)), "dropped": _by_client(text), "loss": measured,
    "sent_bytes": _by_client(whole(0)), "received_bytes": _by_client(whole(0)),
}  # fmt: skip

EVALUATION: Mapping[str, Read] = {
    "rounds": whole(0), "value": measured, "sent_bytes": whole(0), "received_bytes": whole(0),
}  # fmt: skip

OWN: Mapping[str, Read] = {
    "client": whole(0), "examples": whole(0), "labels": optional(whole(0)), "rounds": whole(0),
    "sent_bytes": whole(0), "loss": measured, "accuracy": optional(measured),
}  # fmt: skip


def _round(value: Any, where: str) -> Round:
    found = fields(value, where, ROUND)
    found["clients"] = tuple(found["clients"])
    return Round(**found)


_TEXTS: Mapping[str, Read] = dict.fromkeys(("partition", "method", "update", "aggregate"), text)

RESULTS: Mapping[str, Read] = {
    "task": facts({"name": text, "description": text, "metric_name": text, "higher_is_better": flag}),
    "options": facts({"clients": whole(1), "sample": whole(1), **_TEXTS}),
    "environment": mapping,
    "rounds": listed(_round),
    "failures": listed(text),
    "evaluations": listed(lambda value, where: FederationEvaluation(**fields(value, where, EVALUATION))),
    "clients": listed(lambda value, where: Own(**fields(value, where, OWN))),
    "seconds": amount,
    "privacy": optional(text),
    "schema": whole(1),
}


def is_federation(path: Path) -> bool:
    """Whether a results file is that of a federation; what cannot be read is none."""
    try:
        data = read_json(path)
    except (ResultsError, FileNotFoundError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND  # pyright: ignore[reportUnknownMemberType]


def save(results: Results, path: Path) -> None:
    """Write `results.json` as a whole."""
    data = {"kind": KIND, **{f.name: getattr(results, f.name) for f in dataclasses.fields(results)}}
    data["rounds"] = [dataclasses.asdict(done) for done in results.rounds]
    data["evaluations"] = [evaluation._asdict() for evaluation in results.evaluations]
    data["clients"] = [own._asdict() for own in results.clients]
    write_atomically(path, json.dumps(plain(data), indent=1))


def load(path: Path) -> Results:
    """Read `results.json`.

    Raises:
        ResultsError: it is damaged, or a newer gradwire wrote it.
        OSError: it cannot be read.
    """
    try:
        results = Results(**fields(read_json(path), "results", RESULTS, optional=frozenset({"privacy"})))
        if results.schema > SCHEMA:
            raise ResultsError(f"it has schema {results.schema}, newer than {SCHEMA}: update gradwire")
        if not results.evaluations:
            raise ResultsError("results.evaluations is empty")
    except ResultsError as error:
        raise ResultsError(f"{path} cannot be used: {error}") from error
    return results
