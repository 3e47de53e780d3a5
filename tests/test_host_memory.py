"""Residuals on the host: the same bits as on the device, whenever the copies are made that somebody waits for.

No GPU is needed. `Late` makes each copy as late as the contract of `HostMemory` allows, on tensors of one device: what
was brought is NaN until it is waited for, and what was kept is read only at `order` or `wait`. So whoever uses a tensor
without having waited for it, or writes over one that is still to be copied, gets other bits. What holds on a GPU alone
is in `test_cuda.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import gradwire
from engines import Engines, run_step
from gradwire import parse
from gradwire.core import buffers, saved
from gradwire.core.carry import carry_over
from gradwire.core.errors import AttachError
from gradwire.core.grain import ParameterSpec
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine
from gradwire.drivers.host_memory import WAVES_AHEAD, host_memory
from gradwire.drivers.lockstep import Meeting, VirtualTransport
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.session.memory import held_memory

RANKS, GRAIN, STEPS, BAD_STEP = 2, 60, 5, 2
CPU = torch.device("cpu")
METHODS = [
    *("topk:0.1", "int4", "int8,ef=on", "sign,ef=on", "powersgd:2", "topk:0.1,residual=bf16", "topk:0.1,warmup=2"),
    *("dgc:0.1", "topk:0.1,residual=factored:2", "topk:0.1,ef=ef21", "topk:0.1,worker_momentum=0.9", "none"),
]


class Late:
    """Copies that are made when somebody waits for them, and no sooner."""

    def __init__(self) -> None:
        self._out: list[tuple[Tensor, Tensor]] = []
        self.did: list[str] = []
        self.on_host: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy that is still to be made."""
        kept = torch.full_like(tensor, float("nan"))
        self._out.append((tensor, kept))
        self.on_host.append(kept)
        self.did.append("keep")
        return kept

    def bring(self, kept: Tensor) -> Coming:
        """The same in the other direction, which comes after those before it."""
        assert any(kept is one for one in self.on_host), "it does not lie on the host"
        self.did.append("bring")
        return Coming(self, kept)

    def order(self) -> None:
        """Make all copies to the host."""
        for tensor, kept in self._out:
            kept.copy_(tensor)
        self._out.clear()

    def wait(self) -> None:
        """The same."""
        self.order()


class Early(Late):
    """Copies that are made when they are asked for: what is brought has the values of that time."""

    def bring(self, kept: Tensor) -> Coming:
        """A copy that is made already."""
        self.order()
        return Coming(self, kept.clone())


class Coming:
    """A copy to the device that is still to be made."""

    def __init__(self, host: Late, kept: Tensor) -> None:
        self._host, self._kept, self._brought = host, kept, torch.full_like(kept, float("nan"))

    def wait(self) -> Tensor:
        """Make it, after those to the host that were asked for before."""
        self._host.order()
        self._host.did.append("arrived")
        return self._brought.copy_(self._kept)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 6), nn.Linear(6, 3))


def gradients(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    named = list(model().named_parameters())
    found = [{name: torch.randn(p.shape, generator=generator) for name, p in named} for _ in range(RANKS)]
    if step == BAD_STEP:
        found[1]["1.bias"][2] = float("inf")
    return found


def states(engine: Engine) -> list[dict[str, Tensor]]:
    """What an engine remembers, without what means nothing."""
    return [{p: x.tensor.clone() for p, x in walk(s) if x.kind != "scratch"} for _, s in engine.states()]


def assert_same_bits(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def engines(spec: str, host: Callable[[], Late | None]) -> Engines:
    return Engines(parse(spec), model(), RANKS, 3, GRAIN, host)


@pytest.mark.parametrize("spec", METHODS)
def test_no_bit_depends_on_where_residuals_lie(spec: str) -> None:
    """Over steps of which one is not finite, with a new loss scale after one, and a mean that is dropped."""
    here, there = engines(spec, lambda: None), engines(spec, Late)
    for step in range(STEPS):
        assert_same_bits(here.step(gradients(step)), there.step(gradients(step)))
        for mine, other in zip(here.ranks, there.ranks, strict=True):
            if step == 1:
                for engine in (mine, other):
                    engine.rescale(0.5)
            if step == 3:
                for engine in (mine, other):
                    engine.take_back({"1.weight"})
            if step != 0:  # so that one step follows the last without anybody having waited for the copies
                assert_same_bits(states(mine), states(other))


def test_residuals_come_while_waves_before_their_own_are_coded_and_go_as_soon_as_theirs_has_ended() -> None:
    (engine,) = Engines(parse("topk:0.1"), model(), 1, grain_numel=GRAIN, host=Late).ranks
    waves = len(engine.plan.waves)
    assert waves > WAVES_AHEAD + 1
    host = engine.host
    assert isinstance(host, Late)
    for step in range(2):
        host.did.clear()
        run_step(engine, gradients(step)[0])
        assert Counter(host.did) == {"bring": waves, "arrived": waves, "keep": waves}
        for wave in range(waves):
            sent_for = [i for i, did in enumerate(host.did) if did == "bring"][wave]
            used = [i for i, did in enumerate(host.did) if did == "arrived"]
            assert sent_for < used[max(0, wave - WAVES_AHEAD)]
        assert host.did.index("keep") < len(host.did) - host.did[::-1].index("arrived") - 1


def test_a_step_that_broke_off_leaves_nothing_on_its_way() -> None:
    """What was sent for before the scale changed has the old one's residual."""
    here, there = (Engines(parse("topk:0.1"), model(), 1, 3, GRAIN, host) for host in (lambda: None, Early))
    for one in (here, there):
        engine = one.ranks[0]
        one.step(gradients(0)[:1])
        engine.begin()  # of which no gradient comes
        engine.rescale(2.0)
    assert_same_bits(here.step(gradients(1)[:1]), there.step(gradients(1)[:1]))
    assert_same_bits(states(here.ranks[0]), states(there.ranks[0]))


@pytest.mark.parametrize(("before", "after"), [("topk:0.1", "int4"), ("int4", "none"), ("none", "topk:0.1")])
def test_residuals_on_the_host_are_saved_and_carried_over_to_another_method(before: str, after: str) -> None:
    found: list[object] = []
    for host in (lambda: None, Late):
        old, new = engines(before, host), engines(after, host)
        old.step(gradients(0))
        for rank, (mine, other) in enumerate(zip(old.ranks, new.ranks, strict=True)):
            other.set_states(carry_over(mine.states(), other.states(), rank, RANKS))
        means = [new.step(gradients(step)) for step in (1, 3)]
        kept = [saved.save(engine.states(), rank) for rank, engine in enumerate(new.ranks)]
        again = engines(after, host)
        for rank, engine in enumerate(again.ranks):
            engine.index = new.ranks[rank].index
            engine.set_states(saved.load_all(engine.states(), kept[rank], rank))
        resumed, went_on = again.step(gradients(4)), new.step(gradients(4))
        assert_same_bits(resumed, went_on)
        found.append((means, kept, resumed))
    assert_same_bits(found[0], found[1])


def test_parts_of_a_sharded_model_hold_no_memory_of_a_gradient_between_steps() -> None:
    """A part that comes twice in a step brings what it has just kept, and padding owes nothing."""
    spec = ParameterSpec("w", (7, 5), torch.float32, CPU)
    found: list[object] = []
    for host in (None, Late()):
        planned = plan_parts([[Chunked(spec, 18)]], parse("topk:0.1").scattered(), range(2), 12)
        assert planned.padding
        meeting = Meeting(1)
        engine = Engine(planned, VirtualTransport(meeting, 0), host=host)
        shards: list[Tensor] = []
        for step in range(3):
            engine.begin()
            for time in range(2):
                drawn = torch.Generator().manual_seed(2 * step + time)

                def fill(unit: int, x: Tensor, drawn: torch.Generator = drawn) -> None:
                    torch.randn(x.shape, generator=drawn, out=x)

                engine.run_part(0, fill, lambda unit, mean, shards=shards: shards.append(mean.clone()))
            engine.finish()
            engine.release()
        found.append((shards, states(engine)))
        engine.settle()
        assert sum(x.numel() for x in engine.buffers()) == (0 if host else 36)
    assert_same_bits(found[0], found[1])


def test_a_report_tells_what_lies_on_the_host() -> None:
    here, there = engines("topk:0.1", lambda: None).ranks[0], engines("topk:0.1", Late).ranks[0]
    mine, other = held_memory(here), held_memory(there)
    assert mine.residual_bytes == other.host_residual_bytes == here.dense_bytes
    assert (mine.host_bytes, other.residual_bytes) == (0, 0)
    assert mine.state_bytes == other.state_bytes
    assert "on the host" in str(other)
    assert "on the host" not in str(mine)


# The pool of pinned memory, and what there is to choose ---------------------------------------------------------------


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of what is asked of the system for the pool of pinned memory."""
    asked: list[int] = []

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        asked.append(shape[0] * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(buffers, "PINNED", buffers.BufferPool(allocate))
    yield asked
    buffers.let_go()


def test_pinned_memory_is_pooled_apart_and_given_back(pinned: list[int]) -> None:
    numel = buffers.SMALLEST
    first = buffers.pinned((numel,), torch.float32)
    place = first.data_ptr()
    ordinary = buffers.empty((numel,), torch.float32, CPU)
    del first
    assert buffers.pinned((numel,), torch.float32).data_ptr() == place != ordinary.data_ptr()
    assert pinned == [4 * numel]
    assert buffers.PINNED.use().held_bytes == 4 * numel
    buffers.let_go()
    assert buffers.PINNED.use().held_bytes == 0


def test_a_cpu_has_no_other_place_and_says_so() -> None:
    with pytest.warns(UserWarning, match="changes nothing for tensors on cpu"):
        assert host_memory("host", CPU) is None
    with pytest.raises(AttachError, match="residuals='gpu': give 'device' or 'host'"):
        host_memory("gpu", torch.device("cuda"))


@pytest.mark.usefixtures("one_rank")
def test_a_session_on_a_cpu_says_it_once() -> None:
    like = {"w": torch.zeros(100)}
    with pytest.warns(UserWarning, match="changes nothing"):
        session = gradwire.Session(like, "topk:0.1", residuals="host")
    session.reduce_({"w": torch.ones(100)})  # a second warning would be an error
    session.change("int4")
    session.close()
