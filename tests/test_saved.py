"""What a handle and a `PowerSGDState` have saved is taken up whole, or refused and nothing is changed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from ddp_cases import GRAIN, batches, digest, four_buckets, mlp, sgd, train
from gradwire import hooks
from gradwire.core.errors import StateError
from laws.damage import changed, damages, difference


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


SPECS = ["int4", "powersgd:2", "adaptive_threshold:0.05"]


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("spec", SPECS)
def test_a_handle_refuses_every_damage_and_changes_nothing(spec: str) -> None:
    ddp = four_buckets(mlp())
    with gradwire.attach(ddp, spec, seed=3) as handle:
        train(ddp, batches(0, 3), sgd(ddp))
        state = handle.state_dict()
        for where, damaged in damages(state):
            with pytest.raises(StateError) as refusal:
                handle.load_state_dict(damaged)
            assert len(str(refusal.value)) > 20, where
            assert difference(handle.state_dict(), state) is None, where


@pytest.mark.parametrize("spec", SPECS)
def test_a_handle_saves_what_it_loaded(spec: str) -> None:
    ddp, fresh = four_buckets(mlp()), four_buckets(mlp())
    with (
        gradwire.attach(ddp, spec, seed=3, grain_numel=GRAIN) as handle,
        gradwire.attach(fresh, spec, grain_numel=GRAIN) as other,
    ):
        train(ddp, batches(0, 3), sgd(ddp))
        state = handle.state_dict()
        other.load_state_dict(state)
        train(ddp, batches(0, 4, start=3), sgd(ddp))
        assert difference(other.state_dict(), state) is None
        assert difference(handle.state_dict(), state) is not None


def trained(state: hooks.PowerSGDState, model: nn.Module | None = None) -> DDP:
    """A model after three steps of the hook."""
    ddp = four_buckets(model or mlp())
    ddp.register_comm_hook(state, hooks.powerSGD_hook)
    train(ddp, batches(0, 3), sgd(ddp))
    return ddp


def power_damages(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What must be refused. A draw order of None is right, before the first draw, and so is a key of its own form."""
    order, key = state["draw_order"], state["rng"]["key"]
    yield "a stranger is drawn", {**state, "draw_order": [*order, ["stranger"]]}
    yield "one is not drawn", {**state, "draw_order": order[1:]}
    yield "a word too large", changed(state, ("rng", "key"), key + 2**32)
    yield "a place behind the end", changed(state, ("rng", "pos"), 10**6)
    for where, damaged in damages(state):
        if where not in ("('draw_order',) is None", "('rng', 'key') has shape torch.Size([624]) torch.int64"):
            yield where, damaged


def test_a_powersgd_state_refuses_every_damage_and_changes_nothing() -> None:
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
    trained(state)
    saved = state.state_dict()
    for where, damaged in power_damages(saved):
        with pytest.raises(StateError) as refusal:
            state.load_state_dict(damaged)
        assert len(str(refusal.value)) > 20, where
        assert difference(state.state_dict(), saved) is None, where


def test_a_powersgd_state_without_a_model_refuses_what_no_model_has() -> None:
    state, loading = hooks.PowerSGDState(None, 2, start_powerSGD_iter=1), hooks.PowerSGDState(None, 2)
    trained(state)
    saved, before = state.state_dict(), loading.state_dict()
    for key, value in {"iter": -1, "rng": {}, "draw_order": [[1]], "numel": [1], "parameters": {"w": []}}.items():
        with pytest.raises(StateError):
            loading.load_state_dict({**saved, key: value})
        assert difference(loading.state_dict(), before) is None, key
    loading.load_state_dict(saved)
    assert difference(loading.state_dict(), saved) is None


def test_a_powersgd_state_from_before_the_first_step_begins_anew() -> None:
    state, fresh = (hooks.PowerSGDState(None, 2, start_powerSGD_iter=1) for _ in range(2))
    beginning = state.state_dict()
    ddp = trained(state)
    state.load_state_dict(beginning)
    with torch.no_grad():
        for mine, first in zip(ddp.module.parameters(), mlp().parameters(), strict=True):
            mine.copy_(first)
    train(ddp, batches(0, 3), sgd(ddp))
    assert digest(ddp) == digest(trained(fresh))
    assert difference(state.state_dict(), fresh.state_dict()) is None


def test_a_powersgd_state_of_another_model_is_refused_at_the_first_step() -> None:
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
    trained(state)
    other = hooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
    other.load_state_dict(state.state_dict())
    # last in this file, since it ends the communication of the process group
    with pytest.raises(StateError, match="another model"):
        trained(other, nn.Linear(16, 4))
