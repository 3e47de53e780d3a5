"""What the saved state of an `Averaging` must look like: every deviation is a `StateError` that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.core.checked import checked, facts
from gradwire.core.errors import StateError
from gradwire.core.record import Count
from gradwire.core.renamed import same
from gradwire.core.reshard import reshard

VERSION = 1
SECONDS = "seconds"
"""The key of second moments that travel, a fragment each; a state without any does not have it."""

_Kept = dict[Any, Any]
_FRAGMENT = facts({
    "session": _Kept, "copies": _Kept, "memory": _Kept, "rates": _Kept, "rates_before": _Kept, "deltas": _Kept,
    "sent": _Kept, "due": int,
})  # fmt: skip
_BODY = facts(
    {"steps": Count, "since": Count, "synced": Count, "fragments": list[_FRAGMENT], "buffers": _Kept},
    seconds=list[_FRAGMENT],
)
_PASS = ": pass what state_dict() returned"
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
    if len(state.get(SECONDS, state["fragments"])) != len(state["fragments"]):
        raise StateError(f"the saved state's {SECONDS!r} are not those of its fragments{_PASS}")


def check_head(state: Mapping[str, Any], here: Mapping[str, Any], body: Any) -> None:
    """Refuse what is not of this run, or is not a mapping of the type `body`.

    Raises:
        StateError: with what is missing or differs.
    """
    checked(state, facts(dict.fromkeys(here, Any)), "the saved state of gradwire.sync", StateError, remedy=_PASS)
    for key, value in here.items():
        if not same(state[key], value):
            raise StateError(f"the saved state has {key} {state[key]!r}, this run {value!r}; {_REMEDIES[key]}")
    checked(state, body, "the saved state", StateError, "'s ", _PASS)


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
