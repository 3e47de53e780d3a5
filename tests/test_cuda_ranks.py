"""Several ranks that share a GPU and talk over NCCL, beside the same ranks on CPUs over Gloo.

With `GRADWIRE_DRY_CUDA=1` they run over Gloo without a GPU, to try the cases themselves.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from everything import by_name
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("cuda_cases.py"))
NCCL = "nccl"
BACKENDS = [NCCL, "cpu:gloo,cuda:nccl"]
"""The second is what PyTorch makes where no backend is named, on a host with GPUs."""
IS_NEW = hasattr(PipelineStage, "_warmup_forward_vote")
new_only = pytest.mark.skipif(not IS_NEW, reason="needs PyTorch 2.13")

if not torch.cuda.is_available() and not os.environ.get("GRADWIRE_DRY_CUDA"):
    pytest.skip("there is no CUDA device", allow_module_level=True)


def run(case: str, ranks: int, folder: Path, deadline_s: float = 200, **arguments: Any) -> list[Any]:
    if os.environ.get("GRADWIRE_DRY_CUDA"):
        arguments["backend"] = "gloo"
    hosts = [
        {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} for rank in range(ranks)
    ]
    return run_function(f"{CASES}:{case}", ranks, {"folder": str(folder), **arguments}, deadline_s, environments=hosts)


SPECS = [
    *("none", "bf16", "int8", "int4", "topk:0.05", "sign", "qsgd:15", "powersgd:2", "powersgd:4,factors=fp16"),
    *("none,exchange=twoshot", "int8,exchange=allgather", "none,exchange=ring", "fp16,exchange=rhd"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sessions_over_nccl_train_as_over_gloo(backend: str, tmp_path: Path) -> None:
    ranks = run("compared", 2, tmp_path, what="specs", specs=SPECS, backend=backend, steps=8)
    for spec in SPECS:
        (on_cpus, on_gpu), (_, other) = ([side[spec] for side in of_rank] for of_rank in ranks)
        assert on_gpu["digest"] == other["digest"], spec
        assert on_gpu["bytes"] == on_cpus["bytes"], spec
        assert on_gpu["losses"] == pytest.approx(on_cpus["losses"], rel=0.02), spec
        assert on_gpu["residual"] == pytest.approx(on_cpus["residual"], rel=0.02, abs=1e-6), spec


def test_nodes_of_two_ranks_over_nccl(tmp_path: Path) -> None:
    specs = ["none,node=2", "int4,node=2", "topk:0.05,node=2"]
    ranks = run("compared", 4, tmp_path, what="specs", specs=specs, backend=NCCL, steps=5)
    for spec in specs:
        assert len({of_rank[1][spec]["digest"] for of_rank in ranks}) == 1, spec
        on_cpus, on_gpu = (side[spec] for side in ranks[0])
        assert on_gpu["losses"] == pytest.approx(on_cpus["losses"], rel=0.02), spec


@pytest.mark.parametrize("kind", ["session", "others"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_train_runs_on_a_gpu(backend: str, kind: str, tmp_path: Path) -> None:
    names = [name for name in by_name() if name.startswith("session") == (kind == "session")]
    names = [name for name in names if IS_NEW or not name.startswith("fsdp2")]
    names = [name for name in names if "hogwild" not in name]  # which shares the memory of a CPU, as its error says
    ranks = run("ways", 2, tmp_path, names=names, backend=backend, steps=6, deadline_s=280)
    errors = {name: of_rank[name]["error"] for of_rank in ranks for name in names if "error" in of_rank[name]}
    assert errors == {}
    assert [name for name in names if ranks[0][name]["digest"] != ranks[1][name]["digest"]] == []
    assert [name for name in names if not all(map(math.isfinite, ranks[0][name]["losses"]))] == []


ATTENTION = [
    {"seed": seed, "batch": 2, "heads": 4, "length": 22, "size": 8, "way": way, "layout": layout, **more}
    for seed, (way, layout, more) in enumerate(
        [
            ("ring", "zigzag", {"mask": {"causal": True}, "key_heads": 2}),
            ("ring", "contiguous", {"mask": {"causal": True}, "dropout": 0.3}),
            ("ulysses", "contiguous", {"mask": {"causal": True}}),
            ("ring", "contiguous", {"mask": {"lengths": [9, 13], "causal": True}}),
        ]
    )
]


@pytest.mark.parametrize(("dtype", "bar"), [("float64", 1e-12), ("float32", 1e-5)])
def test_attention_over_split_positions(dtype: str, bar: float, tmp_path: Path) -> None:
    for errors in run("sequences", 2, tmp_path, cases=ATTENTION, dtype=dtype, backend=NCCL):
        assert max(errors) < bar, errors


def test_split_layers(tmp_path: Path) -> None:
    cases = [{"seed": 1, "batch": 2, "length": 13, "width": 16, "inner": 24}]
    for errors in run("split_layers", 2, tmp_path, cases=cases, dtype="float64", backend=NCCL):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("chunks", [1, 2])
def test_experts(chunks: int, tmp_path: Path) -> None:
    assert max(run("experts", 2, tmp_path, chunks=chunks, backend=NCCL)) < 1e-9


@new_only
@pytest.mark.parametrize(("schedule", "codec"), [("1F1B", "none"), ("GPipe", "int8"), ("Interleaved1F1B", "none")])
def test_pipelines(schedule: str, codec: str, tmp_path: Path) -> None:
    ranks = run("stages", 2, tmp_path, schedule=schedule, codec=codec, backend=NCCL)
    for on_cpus, on_gpu in ranks:
        assert on_gpu == pytest.approx(on_cpus, rel=1e-5 if codec == "none" else 0.02)


MODEL = {"layers": 2, "width": 32, "heads": 4, "context": 32}
LAYOUTS = [
    {"model": MODEL, "data": {"batch": 8, "micro_batches": 2}, "steps": {"count": 3}, **axes}
    for axes in (
        {"dp": {"ranks": 2, "method": "int8"}},
        {"tp": {"ranks": 2, "sequence": True, "codec": "int8:32"}},
        {"cp": {"ranks": 2}},
        *([{"pp": {"ranks": 2, "schedule": "1F1B"}}] if IS_NEW else []),
        {"ep": {"ranks": 2}, "model": {**MODEL, "experts": 4}},
    )
]


def test_trainings_on_a_mesh(tmp_path: Path) -> None:
    for of_rank in run("compared", 2, tmp_path, what="on_a_mesh", tables=LAYOUTS, backend=NCCL, steps=3):
        for layout, on_cpus, on_gpu in zip(LAYOUTS, *of_rank, strict=True):
            assert on_gpu == pytest.approx(on_cpus, rel=1e-3), layout


def test_instruments(tmp_path: Path) -> None:
    found = run("instruments", 2, tmp_path, backend=NCCL)[0]
    print(found["doctor"], found["topology"], found["links"], sep="\n")
    assert "2 ranks" in found["topology"]
    assert found["bytes_per_s"] < 5e10, "sockets on one machine, whose messages are timed one by one"
