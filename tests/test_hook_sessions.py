"""The drop-in hooks hold sessions: one lane a process group, one session for each size of bucket, none made twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from ddp_cases import batches, four_buckets, mlp, sgd, train
from gradwire import hooks
from gradwire.adapters import hooks as ports
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("hook_session_cases.py"))


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The tensors of every session that a hook makes."""
    found: list[dict[str, Any]] = []

    class Noted(gradwire.Session):
        def __init__(self, tensors: dict[str, Any], *others: Any, **options: Any) -> None:
            found.append({name: tuple(tensor.shape) for name, tensor in tensors.items()})
            super().__init__(tensors, *others, **options)

    monkeypatch.setattr(ports, "Session", Noted)
    monkeypatch.setattr("gradwire.adapters.power_sgd_port.Session", Noted)
    return found


def hooked(state: object, hook: Any, model: nn.Module | None = None) -> DDP:
    ddp = four_buckets(model or mlp())
    ddp.register_comm_hook(state, hook)
    return ddp


def test_hooks_of_one_group_share_a_lane(made: list[dict[str, Any]]) -> None:
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    models = [hooked(None, hooks.fp16_compress_hook), hooked(None, hooks.allreduce_hook)]
    models.append(hooked(state, hooks.powerSGD_hook))
    for ddp in models:
        train(ddp, batches(0, 2), sgd(ddp))
    lane = ports.lane_of(None, torch.device("cpu"))
    assert len(lane.ports) == 2
    assert state.port(torch.device("cpu"), *layout_of(state)).lane is lane
    assert state.stats().steps == 2
    assert 0 <= state.stats().exposed_s < 60
    assert made


def layout_of(state: hooks.PowerSGDState) -> tuple[Any, float]:
    port = state._port  # pyright: ignore[reportPrivateUsage]
    assert port is not None
    return port.lay_out, state.min_compression_rate


def test_models_that_take_turns_find_their_sessions_again(made: list[dict[str, Any]]) -> None:
    turns = [hooked(None, hooks.allreduce_hook), hooked(None, hooks.allreduce_hook, nn.Linear(16, 4))]
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        for ddp in turns:
            train(ddp, batches(0, 1), sgd(ddp))
    count = len(made)
    for _ in range(5):
        for ddp in turns:
            train(ddp, batches(0, 1), sgd(ddp))
    assert len(made) == count


def test_sizes_that_do_not_come_again_are_forgotten(made: list[dict[str, Any]]) -> None:
    ddp = hooked(None, hooks.allreduce_hook)
    train(ddp, batches(0, 1), sgd(ddp))
    other = hooked(None, hooks.allreduce_hook, nn.Linear(16, 4))
    train(other, batches(0, ports.PATIENCE_STEPS + 2), sgd(other))
    (port,) = ports.lane_of(None, torch.device("cpu")).ports.values()
    assert [size for size, _ in port._sessions] == [68]
    train(ddp, batches(0, 1), sgd(ddp))
    assert len(port._sessions) > 1


def test_a_session_on_the_lane_of_another_leaves_it_open(made: list[dict[str, Any]]) -> None:
    lane = ports.lane_of(None, torch.device("cpu"))
    first, second = (gradwire.Session({"a": torch.zeros(3)}, "none", lane=lane) for _ in range(2))
    first.close()
    given = torch.tensor([1.0, 2.0, 3.0])
    second.reduce_({"a": given})
    second.reduce_({"a": given})
    assert given.tolist() == [1.0, 2.0, 3.0]
    assert second.report().link_latency_ms is None


def test_ranks_whose_hooks_differ_are_told() -> None:
    for found in run_function(f"{CASES}:differing", 2, {}, 120):
        assert "AttachError: ranks disagree on the method: rank 1 has" in found
