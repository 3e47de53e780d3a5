"""The cost driver counts what really travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire import cost, parse
from gradwire.cli.main import main
from gradwire.core.agreement import Total
from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, Collective
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.program import Program
from gradwire.drivers.cost import Cost, MetaTransport, meta_program
from gradwire.drivers.interpreter import Interpreter, Script, run, sent_bytes
from gradwire.drivers.lockstep import Lockstep, VirtualTransport, together
from gradwire.drivers.plan import plan
from gradwire.drivers.timing import SimulatedMeeting, step_s
from gradwire.reducers import Reducer
from gradwire.reducers.step import Reduced, Step
from gradwire.tasks.builtin import make_task

from . import checks
from .subjects import CPU, ranks_for, reducers, sample

REDUCERS = reducers()
MODEL = [
    ParameterSpec("embed.weight", (60, 16), torch.float32, CPU),
    ParameterSpec("conv.weight", (8, 16, 3, 3), torch.float32, CPU),
    ParameterSpec("norm.weight", (8,), torch.bfloat16, CPU),
    ParameterSpec("empty", (0,), torch.float32, CPU),
    ParameterSpec("scale", (), torch.float32, CPU),
    ParameterSpec("head.weight", (60, 16), torch.float32, CPU),
]
PEER_GRAINS = 700


def travelling(requests: list[Collective]) -> list[Collective]:
    """The requests as they travel: totals are added up over grains first, those over grains alone never leave."""
    totals = {(r.over, r.of): r for r in requests if isinstance(r, Total) and r.over == "ranks"}
    gathers: list[Collective] = [AllGather(total.tensor.view(-1).view(torch.uint8)) for total in totals.values()]
    return [r for r in requests if not isinstance(r, Total)] + gathers


def sent(reducer: Reducer, ranks: int) -> list[Collective]:
    """Every collective of one step of the model, as one rank asks for it, on real tensors."""
    found: list[Collective] = []
    for grain, serving in plan(MODEL, reducer, PEER_GRAINS).units:
        spied = checks.Spied(serving)
        xs: list[Tensor] = [sample("heavy", grain.shape, grain.dtype, seed) for seed in range(ranks)]
        Lockstep(spied, grain, ranks).step(xs)
        asked = [spied.asked.get(rank, []) for rank in range(ranks)]  # a ring of one rank asks for nothing
        assert len({len(of_rank) for of_rank in asked}) == 1, "ranks asked for different numbers"
        found += asked[0]
    return travelling(found)


@pytest.mark.parametrize("spec", REDUCERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cost_is_what_travels(spec: str, ranks: int) -> None:
    ranks = ranks_for(REDUCERS[spec], ranks)
    found, real = cost(REDUCERS[spec], MODEL, ranks, grain_numel=PEER_GRAINS), sent(REDUCERS[spec], ranks)
    assert found.payload_bytes == sum(request.nbytes for request in real)
    wire = sum(sent_bytes(request, 0, ranks) for request in real)
    # Coalesced requests are divided by n together and alone one by one, each rounded down.
    assert wire <= found.wire_bytes <= wire + len(real)
    assert found.dense_bytes == sum(p.numel * p.dtype.itemsize for p in MODEL)


META = torch.device("meta")
LAYER_GRAINS = 1000


def layers(count: int) -> list[ParameterSpec]:
    """A model of equal layers, whose matrices are cut into several grains, between two that come once."""
    found = [ParameterSpec("embed.weight", (61, 16), torch.float32, META)]
    for i in range(count):
        shapes = {"up.weight": (50, 20), "up.bias": (50,), "down.weight": (20, 100), "scale": ()}
        found += [ParameterSpec(f"{i}.{name}", shape, torch.float32, META) for name, shape in shapes.items()]
        found.append(ParameterSpec(f"{i}.norm.weight", (20,), torch.bfloat16, META))
    return [*found, ParameterSpec("head.weight", (60, 20), torch.float32, META)]


def unshortened(reducer: Reducer, model: list[ParameterSpec], ranks: int, rank: int, index: int) -> Cost:
    """The cost as it is defined: every wave runs, and what travels is added up."""
    transport, step = MetaTransport(ranks, rank), Step(index, rank, ranks)
    waves = plan(model, reducer, LAYER_GRAINS).waves

    def programs(wave: int) -> list[Program[Reduced]]:
        return [
            serving.reduce(grain, torch.empty(grain.shape, dtype=grain.dtype, device=META), state, step)
            for grain, serving in waves[wave]
            for state in [serving.init(grain, step)]
        ]

    run(Interpreter[Reduced](transport).script(len(waves), programs))
    inside = [r for r in transport.requests if isinstance(r.axis, Axis) and r.axis.stride == 1]
    return Cost(
        sum(request.nbytes for request in transport.requests),
        sum(sent_bytes(request, rank, ranks) for request in transport.requests),
        sum(p.numel * p.dtype.itemsize for p in model),
        len(transport.requests),
        sum(sent_bytes(request, rank, ranks) for request in inside),
    )


def constantly(grains: int) -> Callable[[int], int]:
    """A size of waves that does not depend on the model's."""
    return lambda _: grains


MORE = ("topk:0.1,node=2", "int4,node=2")


@pytest.mark.parametrize(("spec", "grains"), [*((s, 2) for s in (*REDUCERS, *MORE)), *((s, 1) for s in MORE)])
@pytest.mark.draw(5)
def test_what_is_priced_once_costs_what_all_of_it_does(spec: str, grains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.drivers.plan.wave_grains", constantly(grains))
    reducer, model = parse(spec), layers(3)
    ranks = ranks_for(reducer, 6)
    found = cost(reducer, model, ranks, step=7, grain_numel=LAYER_GRAINS, rank=ranks - 1)
    assert found == unshortened(reducer, model, ranks, ranks - 1, 7)


LINK = Link(1e-3, 1e-8)


def unshortened_s(reducer: Reducer, model: list[ParameterSpec], ranks: int, index: int) -> float:
    """The seconds as they are defined: the program of every grain of every rank runs."""
    units, clocks = plan(model, reducer, LAYER_GRAINS).units, SimulatedMeeting(ranks, LINK, {})

    def script(rank: int) -> Script[list[Reduced]]:
        step = Step(index, rank, ranks)
        interpreter = Interpreter[Reduced](VirtualTransport(clocks, rank), window=1)
        return interpreter.script(len(units), lambda i: [meta_program(units[i], step)])

    together([script(rank) for rank in range(ranks)])
    return max(clocks.now)


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("spec", [*REDUCERS, *MORE, "none,exchange=tree"])
@pytest.mark.draw(2)
def test_what_is_timed_once_takes_as_long_as_all_of_it_does(spec: str) -> None:
    reducer, model = parse(spec), layers(3)
    ranks = ranks_for(reducer, 6)
    found = step_s(reducer, model, ranks, LINK, step=7, grain_numel=LAYER_GRAINS)
    assert found == unshortened_s(reducer, model, ranks, 7)


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(spec: str, model: list[ParameterSpec], ranks: int, priced: Callable[..., object] = cost) -> int:
    """How many operations it takes to price a step."""
    with Operations() as counted:
        priced(spec, model, ranks, grain_numel=1600)
    return counted.count


PRICED = ("none", "int4", "topk:0.01", "powersgd:2,factors=fp16", "int4,node=8")


@pytest.mark.parametrize("spec", ["int4", "topk:0.01", "powersgd:2,factors=fp16", "adasum"])
def test_what_timing_takes_hardly_grows_with_equal_layers(spec: str) -> None:
    def timed(spec: str, model: list[ParameterSpec], ranks: int, grain_numel: int) -> float:
        return step_s(spec, model, ranks, LINK, grain_numel=grain_numel)

    few, many = ([ParameterSpec(f"{i}", (80, 80), torch.float32, META) for i in range(n)] for n in (4, 40))
    assert operations(spec, many, 8, timed) < 3 * operations(spec, few, 8, timed), "only what is sent is done ten times"


@pytest.mark.parametrize("spec", PRICED)
def test_what_pricing_takes_grows_neither_with_equal_layers_nor_with_ranks(spec: str) -> None:
    few, many = ([ParameterSpec(f"{i}", (80, 80), torch.float32, META) for i in range(n)] for n in (4, 40))
    taken = operations(spec, few, 8)
    assert taken > 0
    assert operations(spec, many, 8) == taken
    assert operations(spec, few, 16_384) <= taken + 30, "operations for each of the ranks"


def resnet18(classes: int = 10) -> list[ParameterSpec]:
    """Parameters of the ResNet-18 for CIFAR that the PowerSGD paper trains."""
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def convolution(name: str, out: int, into: int, size: int) -> None:
        shapes.append((f"{name}.conv.weight", (out, into, size, size)))
        shapes.extend((f"{name}.bn.{part}", (out,)) for part in ("weight", "bias"))

    convolution("stem", 64, 3, 3)
    width = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            convolution(f"{stage}.{block}.first", channels, width, 3)
            convolution(f"{stage}.{block}.second", channels, channels, 3)
            if width != channels:
                convolution(f"{stage}.{block}.shortcut", channels, width, 1)
            width = channels
    shapes += [("fc.weight", (classes, 512)), ("fc.bias", (classes,))]
    return [ParameterSpec(name, shape, torch.float32, CPU) for name, shape in shapes]


@pytest.mark.parametrize(("rank", "mib"), [(1, 4.2), (2, 7.5), (4, 14.2)])
def test_power_sgd_sends_what_its_paper_says(rank: int, mib: float) -> None:
    """Vogels et al. 2019, Table 3: MiB sent an epoch of 24 steps, against 1023 uncompressed."""
    model = resnet18()
    assert sum(p.numel for p in model) == 11_173_962
    found = cost(parse(f"powersgd:{rank}"), model, world_size=16)
    assert round(24 * found.payload_bytes / 2**20, 1) == mib
    assert round(24 * found.dense_bytes / 2**20) == 1023


def test_the_command_tells_bytes_inside_and_between_nodes_as_python_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "int4,node=2", "--hosts", "4"]) == 0
    printed = capsys.readouterr().out
    found = cost(parse("int4,node=2"), make_task("bytes", 0, None).model, 4, step=1_000_000)
    for nbytes in (found.between_bytes, found.inside_bytes):
        assert f"{nbytes:,} B" in printed
    assert main(["cost", "int4,node=3", "--hosts", "4"]) != 0
    assert "3 ranks a node do not divide the 4 ranks" in "".join(capsys.readouterr()).replace("\n", " ")
