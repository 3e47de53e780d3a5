"""What the saved state of an `Averaging` must look like: every deviation is a `StateError` that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradwire.core.errors import StateError
from gradwire.core.renamed import same
from gradwire.core.reshard import reshard

VERSION = 1
SECONDS = "seconds"
"""The key of second moments that travel, a fragment each; a state without any does not have it."""

_BODY: Mapping[str, type] = {"steps": int, "since": int, "synced": int, "fragments": list, "buffers": Mapping}
_FRAGMENT: Mapping[str, type] = {
    "session": Mapping,
    "copies": Mapping,
    "memory": Mapping,
    "rates": Mapping,
    "rates_before": Mapping,
    "deltas": Mapping,
    "sent": Mapping,
    "due": int,
}
_REMEDIES = {
    "version": "load it with the version of gradwire that wrote it",
    "settings": "make it with the settings it was saved with, or begin anew from the saved model",
    "shard": "each rank loads what was saved of the shard that it holds",
    "rank": "each rank loads what the same rank saved",
    "world_size": "for another number of ranks call sync() before saving, and begin anew from that model",
}


def check_state(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse what has another form, or is not of this run.

    Args:
        state: as saved.
        here: what the state of this run begins with.

    Raises:
        StateError: with what is missing or differs.
    """
    check_head(state, here, _BODY)
    seconds = state.get(SECONDS, state["fragments"])
    if not isinstance(seconds, list) or len(cast("list[Any]", seconds)) != len(state["fragments"]):
        raise StateError(f"the saved state's {SECONDS!r} is damaged: pass what state_dict() returned")
    for number, fragment in enumerate([*state["fragments"], *cast("list[Any]", state.get(SECONDS, []))]):
        for key, kind in _FRAGMENT.items():
            if not isinstance(fragment, Mapping) or not isinstance(cast(Any, fragment).get(key), kind):
                raise StateError(f"{key!r} of fragment {number} of the saved state is damaged or missing")


def check_head(state: Mapping[str, Any], here: Mapping[str, Any], body: Mapping[str, type]) -> None:
    """Refuse what is not of this run, or has not the keys of `body`, each of its type; whole numbers are 0 or more.

    Raises:
        StateError: with what is missing or differs.
    """
    for key in (*here, *body):
        if key not in state:
            raise StateError(f"the saved state of gradwire.sync has no {key!r}: pass what state_dict() returned")
    for key, value in here.items():
        if not same(state[key], value):
            raise StateError(f"the saved state has {key} {state[key]!r}, this run {value!r}; {_REMEDIES[key]}")
    for key, kind in body.items():
        if not isinstance(state[key], kind) or (kind is int and cast(int, state[key]) < 0):
            raise StateError(f"the saved state's {key!r} is damaged: pass what state_dict() returned")


def resharded(states: Sequence[Mapping[str, Any]], here: Mapping[str, Any], is_at_once: bool) -> dict[str, Any]:
    """Return the state of one rank of this run from those of all ranks of a run with another number of ranks.

    Args:
        states: in rank order.
        here: what the state of this run begins with.
        is_at_once: whether the end of a window leaves no difference between ranks.

    Raises:
        StateError: ranks had models of their own when they saved, or states of another form.
    """
    for state in states:
        check_state(state, {**here, "rank": state.get("rank"), "world_size": len(states)})
        apart = state["steps"] != state["synced"] and not (is_at_once and state["since"] == 0)
        if apart or any(fragment["deltas"] for fragment in state["fragments"]):
            raise StateError(
                f"the {len(states)} ranks of the save were within a window, each with a model of its own, which "
                f"{here['world_size']} cannot take up: call sync() before gradwire.save, or load with as many ranks"
            )
    first = states[0]
    parts: dict[str, Any] = {}
    for key in ("fragments", *((SECONDS,) if SECONDS in first else ())):
        sessions = zip(*([part["session"] for part in state[key]] for state in states), strict=True)
        parts[key] = [
            {**part, "session": reshard(list(owed), here["world_size"])[here["rank"]]}
            for part, owed in zip(first[key], sessions, strict=True)
        ]
    return {**first, **here, "since": 0, "synced": first["steps"], **parts}
