"""What the ports to frameworks do where something is missing, without any framework."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.adapters.frameworks import attach_if_distributed, folder_beside, load_if_there, require
from gradwire.session import Session


@pytest.fixture
def ddp(one_rank: None) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 2))


@pytest.fixture
def handle(ddp: DistributedDataParallel) -> Iterator[Session]:
    with gradwire.attach(ddp, "topk:0.2") as handle:
        yield handle


@pytest.mark.parametrize(("found", "is_enough"), [("2.6.0", True), ("3.0", True), ("2.10", True), ("2.5.9", False)])
def test_versions_are_compared_as_numbers(found: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        return found

    monkeypatch.setattr(metadata, "version", version)
    if is_enough:
        require("lightning", "2.6")
        return
    text = r"lightning 2.5.9 is too old, 2.6 or newer is needed: pip install --upgrade 'gradwire\[lightning\]'"
    with pytest.raises(gradwire.AttachError, match=text):
        require("lightning", "2.6")


def test_a_framework_that_is_missing_is_named_with_its_extra() -> None:
    text = r"no-such-thing is not installed: pip install 'gradwire\[no-such-thing\]'"
    with pytest.raises(gradwire.AttachError, match=text):
        require("no-such-thing", "1.0")


def test_training_alone_is_warned_of_and_left_alone() -> None:
    with pytest.warns(UserWarning, match="training is not distributed, so gradwire does nothing here"):
        assert attach_if_distributed(nn.Linear(3, 2), "int4") is None


@pytest.mark.usefixtures("one_rank")
def test_one_rank_without_a_wrapper_is_alone_and_with_one_is_served() -> None:
    with pytest.warns(UserWarning, match="not distributed"):
        assert attach_if_distributed(nn.Linear(3, 2), "int4") is None
    compiled = torch.compile(DistributedDataParallel(nn.Linear(3, 2)), backend="eager")
    assert isinstance(compiled, nn.Module)
    handle = attach_if_distributed(compiled, "int4", seed=3)
    assert handle is not None
    assert (handle.method, handle.seed) == ("int4", 3)
    handle.close()


def test_a_checkpoint_made_without_gradwire_is_warned_of(handle: Session, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the checkpoint old.ckpt has no state of gradwire's: training goes on"):
        load_if_there(tmp_path / "nothing", handle, "old.ckpt")


def test_a_checkpoint_s_states_are_taken_up(ddp: DistributedDataParallel, handle: Session, tmp_path: Path) -> None:
    ddp(torch.ones(1, 3)).sum().backward()
    owed = handle.residual_norm()
    assert owed > 0
    gradwire.save(tmp_path, handle)
    ddp(torch.ones(1, 3)).sum().backward()
    assert handle.residual_norm() != owed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_if_there(tmp_path, handle, "new.ckpt")
    assert handle.residual_norm() == owed


def test_a_checkpoint_of_another_method_says_how_to_go_on(handle: Session, tmp_path: Path) -> None:
    gradwire.save(tmp_path, handle)
    with gradwire.attach(DistributedDataParallel(nn.Linear(3, 2)), "int4") as other:
        with pytest.raises(gradwire.StateError, match=r"then call change\(\); .* with nothing owed, delete"):
            load_if_there(tmp_path, other, "new.ckpt")
        assert other.residual_norm() == 0


def test_a_link_leads_to_the_states_of_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    assert folder_beside(tmp_path / "last.ckpt") == tmp_path / "step=3.ckpt.gradwire"


def test_two_models_of_one_accelerator_save_to_two_folders(one_rank: None) -> None:
    accelerate = pytest.importorskip("accelerate")
    from gradwire.adapters.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True)
    first = attach(accelerator, DistributedDataParallel(nn.Linear(3, 2)), "int4")
    with pytest.raises(gradwire.AttachError, match=r"another model saves its state .*'gradwire'"):
        attach(accelerator, DistributedDataParallel(nn.Linear(3, 2)), "int4")
    second = attach(accelerator, DistributedDataParallel(nn.Linear(3, 2)), "int4", folder="second")
    for handle in (first, second):
        assert handle is not None
        handle.close()
