"""Laws for everything that trains: a layer that is unfrozen, frozen or replaced in mid-run leaves no ranks unequal."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from everything import RANKS, by_name
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("unfreeze_cases.py"))
NAMES = [name for name in by_name() if name == "session int4" or not name.startswith("session")]
"""A session looks at the model before its method has anything to do, so one method stands for all."""

OWN_STEP = [name for name in NAMES if name.startswith(("session", "sync", "asynchronous"))]
"""Those of which gradwire makes the whole step, so that it can refuse one before anything has changed."""

OPTIMIZERS = [name for name in NAMES if name.startswith(("sync", "asynchronous"))]
TAKES_UP = ["post-local"]
"""Those that train whatever requires gradients, as PyTorch's own do."""

BY_NAME = ("session", "attach", "fsdp2")
"""These combine gradients of whatever has the name, and DDP and FSDP2 hand over none of a layer that came later."""

EACH = pytest.mark.parametrize("name", NAMES)


@functools.cache
def ends(case: str) -> list[dict[str, Any]]:
    """What each rank says of each way to train; those that only some tests ask for are left to these."""
    names = {"refused": OWN_STEP, "strange": OPTIMIZERS}.get(case, NAMES)
    return run_function(f"{CASES}:{case}", RANKS, {"names": names}, 280)


def require_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert "error" not in first
    assert first == second


@pytest.mark.one_draw_in(2)
@EACH
def test_a_layer_that_is_unfrozen_is_refused_by_name_or_trained_alike(name: str) -> None:
    first, second = (end[name] for end in ends("unfrozen"))
    if name in TAKES_UP:
        require_equal(first, second)
        assert first["moved"]
        return
    said = "'4.weight' requires a gradient now and did not when"
    waits_for_nobody = name.startswith("asynchronous")
    found = [end for end in (first, second) if end.get("error") == "StepError" and end["text"].startswith(said)]
    assert len(found) == 2, (first, second)
    assert waits_for_nobody or first == second


@pytest.mark.one_draw_in(3)
@EACH
def test_a_layer_that_is_frozen_leaves_ranks_equal_or_is_refused(name: str) -> None:
    first, second = (end[name] for end in ends("frozen"))
    if name.startswith("session"):
        assert first["error"] == "StepError"
        assert first["text"].startswith("'0.weight' requires no gradient any more")
    elif name.startswith("attach"):  # DDP wants a gradient of every parameter that it was made with
        assert "Expected to have finished reduction" in first["text"]
    else:
        require_equal(first, second)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(BY_NAME)])
def test_a_layer_that_is_replaced_is_refused_by_name_or_leaves_ranks_equal(name: str) -> None:
    first, second = (end[name] for end in ends("replaced"))
    if name in TAKES_UP:
        require_equal(first, second)
        return
    for found in (first, second):
        assert found["error"] == "StepError"
        assert found["text"].startswith("'4.weight' is another tensor than when")


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("name", OWN_STEP)
def test_a_refused_step_changes_nothing(name: str) -> None:
    (undisturbed, disturbed), second = (end[name] for end in ends("refused"))
    assert [undisturbed, disturbed] == second
    assert not disturbed["moved"]
    if not name.startswith("asynchronous"):  # in what order those push is another one each time
        assert disturbed == undisturbed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_exchanged_cannot_be_added(name: str) -> None:
    for end in ends("strange"):
        other_model, other_group = end[name]
        assert other_model.startswith("AttachError: parameter 0 of group 0 of the inner optimizer, of shape (8, 6)")
        assert other_group.startswith(("AttachError: a parameter of the new group", "StepError: what ranks exchange"))
