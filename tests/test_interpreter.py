"""The interpreter: one static order whatever carries the messages, and parts that anybody can add."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import gradwire
from gradwire import parse
from gradwire.core.agreement import Agree, Total
from gradwire.core.axis import Axis, SubGroups
from gradwire.core.collective import AllGather, AllReduce, Collective
from gradwire.core.errors import CommunicationError
from gradwire.core.program import Program, along, once
from gradwire.drivers.cost import MetaTransport, parameter_specs
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import Answer, Interpreter, Pending, Traffic, Transport, ask, run, run_program
from gradwire.drivers.lockstep import Meeting, VirtualTransport, run_lockstep, run_ranks, together
from gradwire.drivers.plan import plan
from gradwire.drivers.process_group import GroupTransport, Issued
from gradwire.drivers.traced import Traced
from gradwire.drivers.virtual import VirtualRanks

SOURCES = Path(gradwire.__file__).parent


# What anybody can add, each in 40 lines or fewer ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """A new kind: the tensor of rank `root` for all."""

    verb = "broadcast"

    tensor: Tensor
    root: int = 0
    axis: SubGroups | None = None

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def kind(self) -> object:
        return Broadcast, self.tensor.dtype, self.root, self.axis

    @classmethod
    def joined(cls, requests: Sequence[Broadcast]) -> Broadcast:
        return Broadcast(torch.cat([r.tensor.reshape(-1) for r in requests]), requests[0].root, requests[0].axis)

    @property
    def length(self) -> int:
        return self.tensor.numel()

    def received(self, part: Tensor) -> Tensor:
        return part.view(self.tensor.shape)

    def wire_bytes(self, ranks: int) -> int:
        return self.nbytes if ranks > 1 else 0


class BroadcastingMeeting(Meeting):
    """Virtual ranks that know the new kind."""

    def broadcast(self, requests: Sequence[Broadcast]) -> list[Tensor]:
        return [requests[requests[0].root].tensor.clone() for _ in requests]


class BroadcastingGroup(GroupTransport):
    """A process group that knows it."""

    def broadcast(self, request: Broadcast) -> Issued:
        work = dist.broadcast(request.tensor, request.root, self.group, async_op=True)
        assert work is not None
        return [work], request.tensor


class Files:
    """A new transport: ranks that write what they send into a folder, and read it from there."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size, self.number = folder, rank, world_size, 0

    def issue(self, request: Collective) -> Pending:
        torch.save(request, self._file(self.rank, self.number))
        self.number += 1
        return _FromFiles(self, self.number - 1)

    def _file(self, rank: int, number: int) -> Path:
        return self.folder / f"{number}-{rank}.pt"

    def is_here(self, number: int) -> bool:
        return all(self._file(rank, number).exists() for rank in range(self.world_size))

    def result(self, number: int) -> Tensor:
        files = [self._file(rank, number) for rank in range(self.world_size)]
        return Meeting(self.world_size).perform([torch.load(f, weights_only=False) for f in files])[self.rank]


@dataclass(frozen=True)
class _FromFiles:
    files: Files
    number: int

    def is_here(self) -> bool:
        return self.files.is_here(self.number)

    def wait(self) -> Tensor:
        return self.files.result(self.number)


class PlainLoop:
    """A new adapter: the gradients of a model that DDP knows nothing of, reduced in place."""

    def __init__(self, model: nn.Module, spec: str, transport: Transport) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.engine = Engine(plan(parameter_specs(self.parameters.items()), parse(spec)), transport)

    def deliver(self) -> None:
        self.engine.begin()
        for i, unit in enumerate(self.engine.plan.units):
            for name, start, numel, offset in unit.grain.segments:
                self.engine.deliver(i, offset, self._gradient(name)[start : start + numel])

    def write(self) -> None:
        self.engine.finish()
        for i, unit in enumerate(self.engine.plan.units):
            for name, start, numel, offset in unit.grain.segments:
                self._gradient(name)[start : start + numel] = self.engine.value(i)[offset : offset + numel]
        self.engine.release()

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient.view(-1)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A default group of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


ADDED: list[list[Any]] = [[Broadcast, BroadcastingMeeting, BroadcastingGroup], [Files, _FromFiles], [PlainLoop]]


@pytest.mark.parametrize("parts", ADDED, ids=["kind", "transport", "adapter"])
def test_a_new_part_takes_forty_lines(parts: list[Any]) -> None:
    lines = [line for part in parts for line in inspect.getsource(part).splitlines() if line.strip()]
    assert len(lines) <= 40


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 3))


def test_a_new_kind_works_on_virtual_ranks_and_on_a_process_group(alone: dist.ProcessGroup) -> None:
    def program(rank: int) -> Program[Tensor]:
        first = yield Broadcast(torch.tensor([1.0 + rank]), root=1)
        second = yield Broadcast(first + rank, root=0)
        return first + second

    meeting = BroadcastingMeeting(2)
    scripts = [
        Interpreter[Tensor](VirtualTransport(meeting, rank)).script(1, lambda _, rank=rank: [program(rank)])
        for rank in range(2)
    ]
    assert [found[0].tolist() for found in together(scripts)] == [[4.0], [4.0]]
    assert ask(Broadcast(torch.tensor([5.0])), BroadcastingGroup(alone)).tolist() == [5.0]


def test_a_transport_without_a_method_for_a_kind_says_which_it_needs() -> None:
    for transport in (MetaTransport(1), VirtualTransport(Meeting(1), 0)):
        with pytest.raises(
            CommunicationError, match=r"does not serve Broadcast: it needs a method broadcast\(request\)"
        ):
            ask(Broadcast(torch.ones(1)), transport)


def test_a_new_transport_carries_a_method(tmp_path: Path) -> None:
    gradients = [{name: torch.randn(p.shape) for name, p in model().named_parameters()} for _ in range(2)]
    virtual = VirtualRanks(parse("int4"), model(), 2)
    virtual.step(gradients)
    loops = [PlainLoop(model(), "int4", Files(tmp_path, rank, 2)) for rank in range(2)]
    check_like(virtual, loops, gradients)


@pytest.mark.parametrize("spec", ["int4", "topk:0.1", "powersgd:1", "median"])
def test_a_new_adapter_computes_what_virtual_ranks_do(spec: str) -> None:
    virtual, meeting = VirtualRanks(parse(spec), model(), 3), Meeting(3)
    loops = [PlainLoop(model(), spec, VirtualTransport(meeting, rank)) for rank in range(3)]
    for _ in range(3):
        gradients = [{name: torch.randn(p.shape) for name, p in model().named_parameters()} for _ in range(3)]
        virtual.step(gradients)
        check_like(virtual, loops, gradients)


def check_like(virtual: VirtualRanks, loops: list[PlainLoop], gradients: list[dict[str, Tensor]]) -> None:
    """A step of all loops leaves on each rank what virtual ranks have."""
    for loop, own in zip(loops, gradients, strict=True):
        for name, parameter in loop.parameters.items():
            parameter.grad = own[name].clone()
        with torch.no_grad():
            loop.deliver()
    with torch.no_grad():
        together([loop.engine.script() for loop in loops])
        for loop in loops:
            loop.write()
            for name, parameter in virtual.model.named_parameters():
                assert torch.equal(loop.parameters[name].grad, parameter.grad)  # pyright: ignore[reportArgumentType]


# One place ------------------------------------------------------------------------------------------------------


def test_one_place_advances_programs() -> None:
    """`core/program.py` says how, the interpreter does it; nobody else sends a generator anything."""
    found = subprocess.run(
        ["grep", "-rlE", r"\badvance\(|\.send\((None|answer|value)", "--include=*.py", str(SOURCES)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {str(Path(line).relative_to(SOURCES)) for line in found.stdout.split()}
    assert names == {"core/program.py", "drivers/interpreter.py", "drivers/lockstep.py", "drivers/engine.py"}
    for driver in ("lockstep", "engine"):  # these drive scripts
        assert "import advance" not in (SOURCES / "drivers" / f"{driver}.py").read_text()


# The order ------------------------------------------------------------------------------------------------------


class Noted:
    """A world of one that notes what is asked for."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def issue(self, request: Collective) -> Pending:
        self.asked.append((type(request).__name__, request.nbytes))
        return Answer(request.tensor.view(1, -1) if isinstance(request, AllGather) else request.tensor)  # type: ignore[attr-defined]


def two_rounds(wave: int) -> Program[int]:
    yield AllReduce(torch.zeros(10 * wave + 1))
    yield AllReduce(torch.zeros(10 * wave + 2))
    return wave


@pytest.mark.parametrize(
    ("window", "order"), [(1, [1, 2, 11, 12, 21, 22]), (2, [1, 11, 2, 12, 21, 22]), (3, [1, 11, 21, 2, 12, 22])]
)
def test_waves_take_turns_in_a_window(window: int, order: list[int]) -> None:
    noted, traffic = Noted(), Traffic()
    waves = Interpreter[int](noted, traffic, window).script(3, lambda wave: [two_rounds(wave)])
    assert run(waves) == [0, 1, 2]
    assert noted.asked == [("AllReduce", 4 * numel) for numel in order]
    assert traffic.payload_bytes == 4 * sum(order)


def test_a_wave_that_is_not_ready_holds_up_those_behind_it() -> None:
    ready, noted = [True, False, True], Noted()
    script = Interpreter[int](noted, window=2).script(3, lambda wave: [two_rounds(wave)] if ready[wave] else None)
    assert next(script) is None  # the second is not ready, though the first waits for its result
    assert noted.asked == [("AllReduce", 4)]
    ready[1] = True
    assert together([script]) == [[0, 1, 2]]
    assert [nbytes // 4 for _, nbytes in noted.asked] == [1, 11, 2, 12, 21, 22]


def test_totals_and_flags_of_a_step_travel_once() -> None:
    def program(value: float) -> Program[tuple[float, bool]]:
        total = yield Total(torch.tensor([value], dtype=torch.float64), "sum")
        own = yield Total(torch.tensor([value], dtype=torch.float64), "mine", "grains")
        found = yield Agree(torch.tensor(value > 2.5))
        return float(total) + 100 * float(own), bool(found)

    noted = Noted()
    waves = Interpreter[tuple[float, bool]](noted).script(2, lambda wave: [program(wave + 1.0), program(wave + 2.0)])
    assert run(waves) == [(808.0, False), (808.0, False), (808.0, False), (808.0, True)]
    assert noted.asked == [("AllGather", 8), ("AllReduce", 4)]


def test_ranks_that_ask_for_different_things_are_found() -> None:
    x = torch.zeros(2)
    with pytest.raises(AssertionError, match="ranks yielded different collectives"):
        run_lockstep([once(AllReduce(x)), once(AllGather(x.view(torch.uint8)))])
    with pytest.raises(AssertionError, match="rank 1 never came to where the others wait"):
        run_ranks([[[once(AllReduce(x))], [once(AllReduce(x))]], [[once(AllReduce(x))]]])


def test_a_program_of_a_sub_group_asks_there() -> None:
    found = run_lockstep([along(once(AllReduce(torch.tensor([2.0**rank]))), Axis(2)) for rank in range(4)])
    assert [x.item() for x in found] == [3, 3, 12, 12]


# Traced ---------------------------------------------------------------------------------------------------------


def test_a_trace_has_a_span_for_every_wait_and_for_all_coding() -> None:
    ticks = iter(range(100))
    traced = Traced(VirtualTransport(Meeting(1), 0), clock=lambda: float(next(ticks)))
    traced.begin()
    run_program(two_rounds(0), traced)
    kinds = [span.kind for span in traced.spans]
    assert kinds == ["encode", "decode", "wait", "wire"] * 2
    coded = sum(span.length_s for span in traced.spans if span.kind in ("encode", "decode"))
    waited = sum(span.length_s for span in traced.spans if span.kind == "wait")
    assert coded + waited <= traced.spans[-1].ended_s - traced.spans[0].began_s
