"""A handle's own duties, on a group of one rank in this process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import hooks
from gradwire.adapters.communication import BucketStep
from gradwire.core.errors import AttachError, StateError
from gradwire.drivers.checked import Checked
from gradwire.drivers.window import NORM_EVERY, START_UP, Window

pytestmark = pytest.mark.usefixtures("one_rank")


def train(ddp: DDP, steps: int, factor: float = 1.0) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        (ddp(torch.ones(2, 4)).sum() * factor).backward()


def test_a_step_after_close_is_refused_in_a_sentence() -> None:
    ddp = DDP(nn.Linear(4, 4))
    gradwire.attach(ddp, "none", deadline_s=1).close()
    with pytest.raises((AttachError, RuntimeError), match="this session is closed"):
        train(ddp, 1)


def test_a_checksum_travels_with_payloads_and_changes_no_gradient() -> None:
    """Of 4 bytes a payload, on one rank as on many."""
    seen: dict[bool, list[list[float]]] = {}
    for checksum in (False, True):
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(4, 4))
        with gradwire.attach(ddp, "int4", checksum=checksum) as handle:
            assert isinstance(handle.session.engine.transport, Checked) == checksum
            train(ddp, 3)
        seen[checksum] = [p.grad.flatten().tolist() for p in ddp.parameters() if p.grad is not None]
    assert seen[True] == seen[False]
    assert any(any(gradient) for gradient in seen[True])


def test_the_norm_is_taken_of_one_step_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, taken = DDP(nn.Linear(4, 4)), list[int]()
    handle = gradwire.attach(ddp, "none")

    def note(window: Window, bucket: Tensor, is_first: bool, scale: float) -> None:
        if is_first:
            taken.append(handle.stats().steps)

    monkeypatch.setattr(Window, "gradient", note)
    train(ddp, START_UP + NORM_EVERY + 3)
    assert taken == [START_UP, START_UP + NORM_EVERY]
    handle.close()


def test_what_is_owed_follows_the_scale_of_the_scaler() -> None:
    """A scale that halves and comes back is as if it had never changed: powers of two are exact."""
    states: list[Tensor] = []
    for scales in ([64.0] * 4, [64.0, 32.0, 32.0, 64.0]):
        torch.manual_seed(0)
        ddp, scaler = DDP(nn.Linear(4, 4)), torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))  # makes its scale
        with gradwire.attach(ddp, "topk:0.2", scaler=scaler) as handle:
            for scale in scales:
                scaler.update(scale)
                train(ddp, 1, factor=scaler.get_scale())
            leaves = handle.state_dict()["parameters"]["weight"]
            (pieces,) = (pieces for path, pieces in leaves.items() if path.startswith("element:"))
            states.append(pieces[0]["values"])
    assert torch.equal(*states)
    assert float(states[0].abs().sum()) > 1.0


class Wide(nn.Module):
    """A vector that is larger than a grain, and of whose gradient no two elements are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300_000))

    def forward(self, x: Tensor) -> Tensor:
        """Of the size of the vector."""
        return x.sum() * self.weight * torch.linspace(1.0, 2.0, self.weight.numel())


def test_a_parameter_in_many_pieces_comes_back_whole() -> None:
    """One rank, nothing compressed: the mean is the gradient, though grains cut it and buckets join what is cut."""
    powersgd = hooks.PowerSGDState(None, start_powerSGD_iter=10)
    gradients: list[list[Tensor]] = []
    for how in ("plain", "attach", "hook"):
        torch.manual_seed(0)
        ddp = DDP(nn.Sequential(nn.Linear(4, 3), Wide()))
        handle = gradwire.attach(ddp, "none", grain_numel=7000) if how == "attach" else None
        if how == "hook":
            ddp.register_comm_hook(powersgd, hooks.powerSGD_hook)
        for _ in range(3):  # DDP rebuilds its buckets after the first
            ddp.zero_grad()
            ddp(torch.arange(8.0).view(2, 4)).sum().backward()
        gradients.append([p.grad for p in ddp.parameters() if p.grad is not None])
        if handle is not None:
            handle.close()
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


def test_a_checkpointer_that_keeps_one_of_each_name_is_refused(tmp_path: Path) -> None:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    with gradwire.attach(DDP(nn.Linear(4, 4)), "int4") as handle:
        for given in (handle, handle.session):
            with pytest.raises((StateError, dcp.CheckpointException), match=r"pass session\.stateful\(\) of a model"):
                dcp.save({"gradwire": given}, checkpoint_id=tmp_path / "checkpoint")
        assert handle.state_dict()["step"] == 0


def test_one_rank_loads_what_it_saved_or_says_what_it_does_not_find(tmp_path: Path) -> None:
    ddp, other = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 4))
    with gradwire.attach(ddp, "topk:0.2") as handle, gradwire.attach(other, "topk:0.2") as loading:
        train(ddp, 3)
        gradwire.save(tmp_path, handle)
        assert gradwire.load(tmp_path, loading) == 3
        assert loading.residual_norm() == handle.residual_norm() > 0
        for file in tmp_path.rglob("rank0.safetensors"):
            file.unlink()
        with pytest.raises(StateError, match=r"rank 0 finds no rank0\.safetensors"):
            gradwire.load(tmp_path, loading)


def test_a_gradient_counts_as_written_if_it_is_replaced_or_changed_in_place() -> None:
    replaced, changed, kept, absent = parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    for parameter in (replaced, changed, kept):
        parameter.grad = torch.zeros(2)
    step = BucketStep()
    step.watch(parameters)
    replaced.grad = torch.zeros(2)
    assert changed.grad is not None
    changed.grad.add_(0.0)
    assert [parameter is kept or parameter is absent for parameter in step.unwritten()] == [True, True]
