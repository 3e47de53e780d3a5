"""`gradwire compare --engine fsdp2`: what it refuses, and that its runs are those of DDP by other means."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comparisons import Silent
from gradwire.compare import compare
from gradwire.compare.options import CompareError, CompareOptions
from gradwire.compare.plan import make_plan
from gradwire.compare.results import Comparison, Run
from gradwire.compare.sharded import blocks
from gradwire.core.errors import CompositionError, GradwireError
from gradwire.report.page import render
from gradwire.session.automatic import CHOOSES_AFTER, EARLY_AFTER

TASK = """
import torch
from torch import nn
from gradwire.tasks.task import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(30, 64), nn.Linear(64, 5)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).relu() * self.scale.to(x.dtype)
        return self.leave(x)

def task(seed):
    torch.manual_seed(seed)
    net = Net()
    teacher = torch.randn(30, 5, generator=torch.Generator().manual_seed(9))
    def batch(step, rank, world_size):
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, (x @ teacher).argmax(1)
    held_out = batch(99, 0, 1)
    def metric(model):
        return float(nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
    options = {"higher_is_better": False, "clip_norm": 1.0, "evaluate_every": 4}
    return Task(net, batch, nn.functional.cross_entropy, metric, **options)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "gradwire_sharded_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "gradwire_sharded_task:task"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            "torch.fp16",
            "torch.fp16 is not for --engine fsdp2, which has torch.fp32, torch.bf16, torch.noop: fp16 needs",
        ),
        ("torch.powersgd:4", "torch.powersgd:4 is not for --engine fsdp2"),
        ("local:H=2", "local:H=2 is not for --engine fsdp2 but for --engine ddp"),
        ("ssp:4", "ssp:4 is not for --engine fsdp2 but for --engine ddp"),
        ("auto:brave", "'brave' is no class of accuracy"),
        ("powersgd:4", "FSDP2 needs a method that ends with shards"),
        ("int8,parameters=sign", "would change parameters by"),
        ("int8,parameters=topk:0.01", "would change parameters by"),
        ("int8,parameters=", "an option is written name=value"),
        ("parameters=int8", "parameters"),
        ("int8,parameters=int9000", "int9000"),
    ],
)
def test_methods_without_shards_are_refused_before_anything_starts(method: str, said: str) -> None:
    with pytest.raises(GradwireError, match=re.escape(said)):
        make_plan(CompareOptions(engine="fsdp2", methods=(method,)))


def test_buckets_and_other_engines_are_refused() -> None:
    with pytest.raises(CompareError, match="fsdp2 has no buckets"):
        make_plan(CompareOptions(engine="fsdp2", bucket_mb=1.0))
    with pytest.raises(GradwireError, match="no engine 'zero': there are ddp and fsdp2"):
        make_plan(CompareOptions(engine="zero"))  # pyright: ignore[reportArgumentType]


def test_what_ddp_takes_has_no_codec_for_parameters() -> None:
    with pytest.raises((GradwireError, CompositionError), match="parameters"):
        make_plan(CompareOptions(methods=("int8,parameters=int8",)))


def test_each_engine_has_its_own_selection() -> None:
    assert "torch.fp16" in CompareOptions().methods
    assert "int8,parameters=int8" in CompareOptions(engine="fsdp2").methods
    assert make_plan(CompareOptions(engine="fsdp2", task="digits")).grid[0] == ("torch.fp32", 0)


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2)])
    outer = nn.ModuleList([nn.Sequential(inner), nn.Linear(2, 2)])
    assert list(blocks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(outer)))) == list(outer)


METHODS = ("torch.fp32", "torch.bf16", "torch.noop", "none,parameters=none", "int8,parameters=int8")


def run(options: CompareOptions) -> tuple[Comparison, dict[str, Run]]:
    comparison = compare.compare(options, Silent())
    for one in comparison.runs:
        assert one.status == "finished", one.reason
    return comparison, {one.method: one for one in comparison.runs}


def values(run: Run) -> list[float]:
    return [evaluation.value for evaluation in run.evaluations]


@pytest.mark.one_draw_in(3)
def test_shards_train_as_replicas_do_and_predict_what_they_send(task: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = CompareOptions(task, METHODS, "fsdp2", hosts=2, rate="1gbit", steps=10, out=out)
    comparison, sharded = run(options)
    _, replicated = run(dataclasses.replace(options, engine="ddp", methods=("torch.fp32",), out=tmp_path / "ddp"))

    whole = replicated["torch.fp32"]
    for method in ("torch.fp32", "none,parameters=none"):
        torch.testing.assert_close(sharded[method].losses, whole.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values(sharded[method]), values(whole), rtol=1e-4, atol=1e-5)
    for method in ("torch.bf16", "int8,parameters=int8"):
        assert sharded[method].losses != whole.losses
        torch.testing.assert_close(values(sharded[method]), values(whole), rtol=0.05, atol=0.05)
    assert sharded["torch.noop"].losses != whole.losses

    fp32, bf16, noop, none, int8 = (sharded[method].wire for method in METHODS)
    for wire in (fp32, bf16, none, int8):
        assert abs(wire.other) < 0.25 * wire.payload  # the norm of gradients travels too, and this model is small
    assert fp32.payload == 2 * bf16.payload > none.payload > int8.payload
    assert noop.total < 0.05 * fp32.total
    split = sharded["torch.fp32"].split
    assert split.wait_s > 0
    assert split.compute_s > 0

    page = render(comparison)
    assert "FSDP2: a group for each element" in page
    assert "buckets" not in page
    with pytest.raises(CompareError, match=r"engine was 'fsdp2', is None"):
        compare.compare(dataclasses.replace(options, engine="ddp", methods=("torch.fp32",)), Silent())


@pytest.mark.long
def test_auto_chooses_among_methods_with_shards(task: str, tmp_path: Path) -> None:
    options = CompareOptions(
        task, ("torch.fp32", "auto:lossless"), "fsdp2", hosts=2, rate="1gbit", steps=12, out=tmp_path / "out"
    )
    _, found = run(options)
    label = found["auto:lossless"].label
    assert label in {f"none from step {step}" for step in (EARLY_AFTER, CHOOSES_AFTER)}  # times decide which
    assert found["auto:lossless"].report is not None
    assert found["auto:lossless"].report["chosen"].startswith(f"auto:lossless took {label} on")


@pytest.mark.long
def test_a_slow_host_is_slow_in_shards_too(task: str, tmp_path: Path) -> None:
    def compute_s(**changes: Any) -> float:
        place = tmp_path / str(len(changes))
        options = CompareOptions(task, ("torch.fp32",), "fsdp2", hosts=2, rate="1gbit", steps=10, out=place, **changes)
        return run(options)[1]["torch.fp32"].times_s[-1]

    assert compute_s(slow=("1:20x",)) > 3 * compute_s()
