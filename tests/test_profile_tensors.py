"""What a profile tells of tensors and methods, and the scalars that it becomes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.cli.main import main
from gradwire.core.errors import StepError
from gradwire.profiling import (
    TensorRecord,
    account,
    by_method,
    read_records,
    summary,
    write_scalars,
)
from gradwire.report.profile import render
from profile_records import record, step

# Tensors ----------------------------------------------------------------------------------------------------------


def tensor(name: str, wire_bytes: float, residual: float | None, method: str = "int4") -> TensorRecord:
    return TensorRecord(name, method, 4000, wire_bytes, residual)


def test_bytes_and_compression_are_told_by_tensor_and_by_method() -> None:
    kept = [tensor("wte.weight", 1000.0, 3.0), tensor("norm.weight", 4000.0, None, "none")]
    other = [tensor("wte.weight", 3000.0, 4.0), tensor("norm.weight", 4000.0, None, "none")]
    found = account([replace(record(0, step(0)), tensors=kept), replace(record(1, step(0)), tensors=other)])
    norm, wte = found.tensors
    assert (wte.name, wte.wire_bytes, wte.ratio, wte.residual_norm) == ("wte.weight", 2000.0, 2.0, 4.0)
    assert (norm.ratio, norm.residual_norm) == (1.0, None)
    assert [(each.method, each.ratio) for each in by_method(found.tensors)] == [("none", 1.0), ("int4", 2.0)]
    lines = summary(found).splitlines()
    assert [line.split() for line in lines if line.startswith("wte")] == [
        ["wte.weight", "4.00", "kB", "2.00", "kB", "2.00x", "4.00"]
    ]
    assert json.loads(json.dumps(found.as_dict()))["tensors"][1]["ratio"] == 2.0


def test_a_table_has_the_largest_tensors_and_the_others_together() -> None:
    kept = [tensor(f"layers.{place}.{'x' * 50}.weight", 100.0 * place, 1.0) for place in range(1, 10)]
    records = [replace(record(0, step(0)), tensors=kept), record(1, step(0))]
    text = summary(account(records))
    assert [line for line in text.splitlines() if line.startswith("layers.9.xxx")]
    assert "layers.4.xxx" not in text
    (others,) = [line.split() for line in text.splitlines() if line.startswith("4 others")]
    assert others[-4:] == ["1.00", "kB", "16.0x", "2.00"]
    page = render(records, 0)
    assert page.count("layers.") == 9
    assert "<h2>Tensors</h2>" in page


@pytest.mark.usefixtures("one_rank")
def test_a_profile_of_one_rank_keeps_what_is_owed_of_each_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    session = gradwire.Session(model, "topk:0.1")
    with gradwire.profile(model, tmp_path, session=session) as profile:
        for batch in profile.steps(torch.randn(5, 3, 8)):
            model(batch).square().mean().backward()
            session.reduce_(model)
    found = profile.account()
    assert {each.name for each in found.tensors} == {name for name, _ in model.named_parameters()}
    assert {each.method for each in found.tensors} == {"topk:0.1"}
    (of_all,) = by_method(found.tensors)
    assert of_all.residual_norm == pytest.approx(session.residual_norm(), rel=1e-6)
    assert of_all.residual_norm is not None
    assert of_all.residual_norm > 0
    assert of_all.dense_bytes == session.engine.dense_bytes
    assert read_records(tmp_path) == profile.records
    session.close()


# TensorBoard ------------------------------------------------------------------------------------------------------


class Kept:
    """Keeps the scalars that it is told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int, /) -> None:
        self.values[tag, step] = value


def test_each_step_becomes_scalars_and_tensors_those_of_the_last(tmp_path: Path) -> None:
    records = [
        replace(record(0, step(4), step(5)), tensors=[tensor("w", 1000.0, 3.0)]),
        replace(record(1, step(4, late_s=3.0), step(5)), tensors=[tensor("w", 1000.0, None)]),
    ]
    kept = Kept()
    write_scalars(records, kept)
    assert kept.values["profile/wait_ms/rank0", 4] == pytest.approx(3000.0)
    assert kept.values["profile/wait_ms/rank0", 5] == 0.0
    assert kept.values["profile/step_ms/rank1", 5] == pytest.approx(10_000.0)
    of_tensors = {at: value for at, value in kept.values.items() if at[0].endswith("/w")}
    assert of_tensors == {
        ("profile/wire_bytes/w", 5): 1000.0,
        ("profile/ratio/w", 5): 4.0,
        ("profile/residual/w", 5): 3.0,
    }
    assert len(kept.values) == 2 * 2 * 9 + 3


def test_what_a_folder_for_tensorboard_needs_is_said(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    record(0, step(0), size=1).write(tmp_path)
    assert main(["profile", str(tmp_path), "--tensorboard", str(tmp_path / "runs")]) == 2
    assert "pip install tensorboard, or pass an object" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "t.json"), "--tensorboard", str(tmp_path / "runs")]) == 2
    assert "traces of torch.profiler have no steps" in capsys.readouterr().err
    with pytest.raises(StepError, match="after its with block"):
        gradwire.profile(nn.Linear(2, 2), tmp_path).to_tensorboard(Kept())
