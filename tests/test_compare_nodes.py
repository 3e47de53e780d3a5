"""`gradwire compare --nodes`: several ranks on each emulated host, fast links inside and slow ones between."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import gradwire
from comparisons import comparison, run
from gradwire.cli import main as cli
from gradwire.compare import compare, figures, run_folder, storage
from gradwire.compare.options import CompareError, CompareOptions
from gradwire.compare.plan import ComparisonPlan, make_plan
from gradwire.compare.results import Wire
from gradwire.core.errors import NetworkError
from gradwire.network import Network
from gradwire.report.page import render

METHOD = "int4,node=auto"

STEPS = 3

MODEL = "nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 4))"

TASK = f"""
import torch
from torch import nn

def task(seed):
    torch.manual_seed(seed)
    def batch(step, rank, world_size):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, x[:, :4].argmax(1)
    return {MODEL}, batch, nn.functional.cross_entropy, lambda model: 50.0
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "gradwire_toy_nodes.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    return "gradwire_toy_nodes:task"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (CompareOptions(nodes="2by2"), "--nodes '2by2' cannot be read: write nodes by the ranks on each, such as 2x2"),
        (CompareOptions(nodes="2x"), "cannot be read"),
        (CompareOptions(nodes="1x4"), "at least 2 nodes"),
        (CompareOptions(nodes="2x0"), "at least 1 rank"),
        (CompareOptions(nodes="40x40"), "1,600 ranks: at most 1,000"),
        (CompareOptions(nodes="2x2", hosts=3), "give --hosts or --nodes, not both"),
        (CompareOptions(nodes="2x2", rate="1gbit", rate_between="50mbit"), "give --rate or --rate-between, not both"),
        (CompareOptions(nodes="2x2", rates=("1gbit", "50mbit"), rate_between="50mbit"), "not both"),
        (CompareOptions(nodes="2x2", rates=("1gbit",) * 4), "4 rates for 2 hosts"),
        (CompareOptions(nodes="2x2", rate_between="fast"), "rate 'fast'"),
        (CompareOptions(nodes="2x2", slow=("2:4x",)), "slow host 2 does not exist"),
        (CompareOptions(nodes="2x2", network="paced"), "several ranks on a host need a network of mode auto"),
        (CompareOptions(nodes="3x1", methods=("int4,node=2",)), "do not divide the 3 ranks"),
        (CompareOptions(rate_between="50mbit"), "--rate-between is for --nodes"),
    ],
)
def test_nodes_that_cannot_be_emulated_are_refused(options: CompareOptions, said: str) -> None:
    with pytest.raises(CompareError if "divide" not in said else gradwire.GradwireError, match=re.escape(said)):
        make_plan(options)


def planned(**changes: object) -> ComparisonPlan:
    return make_plan(CompareOptions(task="digits", methods=("torch.fp32",), **changes))  # pyright: ignore[reportArgumentType]


def test_nodes_are_hosts_whose_ranks_share_a_link() -> None:
    plan = planned(nodes="3x2", rate_between="50mbit", slow=("1:4x",))
    assert (plan.options.hosts, plan.options.rate, plan.ranks) == (3, "50mbit", 6)
    assert plan.slow == (1.0, 1.0, 4.0, 4.0, 1.0, 1.0)
    assert plan.conditions("root", "torch.fp32")["nodes"] == "3x2"
    assert planned(hosts=2).ranks == 2


def test_runs_of_other_nodes_are_refused(tmp_path: Path) -> None:
    folder = run_folder.prepare_folder(tmp_path, fresh=True)
    flat, nodes = (planned(**of).conditions("root", "torch.fp32") for of in ({"hosts": 4}, {"nodes": "2x2"}))
    others = planned(nodes="2x4").conditions("root", "torch.fp32")
    cells = [("torch.fp32", 0)]
    for made_under, asked, said in (
        (nodes, flat, "hosts was 2, is 4; nodes was '2x2', is None"),
        (nodes, others, "nodes was '2x2', is '2x4'"),
        (flat, nodes, "nodes was None, is '2x2'"),
    ):
        run_folder.store_run(folder, compare.dataclasses.replace(run("torch.fp32"), conditions=made_under))
        with pytest.raises(CompareError, match=re.escape(said)):
            run_folder.stored_runs(folder, cells, lambda _, asked=asked: asked)
    older = {name: value for name, value in flat.items() if name != "nodes"}  # from before there were nodes
    run_folder.store_run(folder, compare.dataclasses.replace(run("torch.fp32"), conditions=older))
    assert len(run_folder.stored_runs(folder, cells, lambda _: flat)) == 1


def test_what_goes_through_the_link_is_what_a_step_sends() -> None:
    made = run("torch.fp32")
    wire = compare.dataclasses.replace(made.wire, between=60.0)
    shared = compare.dataclasses.replace(made, wire=wire)
    options = {"hosts": 2, "nodes": "2x2", "rate": "50mbit", "steps": 4, "minutes": None, "bucket_mb": 25.0}
    (row,) = figures.summarise(comparison(shared, options=options))
    assert row.bytes_per_step == 60.0 / 4
    assert Wire(total=100.0).through_link == 100.0
    page = render(comparison(shared, options=options))
    assert "2 nodes of 2 ranks, links of 50mbit" in " ".join(page.split())  # no line ends behind a number
    assert "bytes sent by each node" in page
    assert page.count("node to node") == 1
    assert "node to node" not in render(comparison(made))


@pytest.mark.net
@pytest.mark.timeout(180)
@pytest.mark.long
def test_nodes_from_end_to_end(toy: str, tmp_path: Path) -> None:
    """Nodes are found, and the counters of their links show what is predicted for them."""
    try:
        with Network(2, "50mbit", ranks_per_host=2):
            pass
    except NetworkError as error:
        pytest.skip(f"no network of hosts here: {error}")
    words = ["--task", toy, "--nodes", "2x2", "--rate-between", "50mbit", "--steps", str(STEPS), "--methods", METHOD]
    assert cli.main(["compare", *words, "--out", str(tmp_path / "out")]) == 0
    found = storage.load(tmp_path / "out" / "results.json")
    assert found.environment["network"].startswith("2 hosts of 2 ranks as network namespaces")
    wire = found.finished(METHOD)[0].wire
    model = eval(MODEL, {"nn": nn})
    cost = gradwire.cost("int4,node=2", model, 4)
    assert wire.payload == STEPS * cost.wire_bytes
    assert wire.surprise is not None
    assert abs(wire.surprise) < 0.02  # the prediction holds for all that ranks sent, inside nodes and between
    predicted, control = 2 * cost.between_bytes, 2 * 6000
    assert STEPS * predicted < wire.between < STEPS * (1.05 * predicted + control)
    assert wire.between < 0.1 * 2 * wire.payload  # what stays inside a node never reaches its link
