"""Sessions: training loops without DDP get what `attach` gives, and whoever uses one wrongly is told how."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AttachError, Session, SessionStep, StepError
from gradwire.core.errors import CommunicationError, NonFiniteWarning
from gradwire.ranks.supervised import run_function
from gradwire.reducers.aggregate import epsilon
from gradwire.session import names
from gradwire.session.failures import FailureBoard
from gradwire.session.overlap_settings import OverlapSettings

CASES = str(Path(__file__).with_name("session_cases.py"))

pytestmark = pytest.mark.one_of("ranks")
SPECS = ["int4", "topk:0.01", "powersgd:4", "median", "dp:1,noise=0"]
PRIVATE = "dp:1"


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 120)


@functools.cache
def alike(ranks: int) -> list[dict[str, list[dict[str, Any]]]]:
    return run("alike", ranks, specs=[*SPECS, PRIVATE])


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_a_plain_loop_gives_the_parameters_that_attach_does(spec: str, ranks: int) -> None:
    for found in alike(ranks):
        attached, loop, pieces = found[spec]
        assert attached["steps"] == 6
        assert loop == attached
        assert pieces == attached
    assert len({found[spec][0]["digest"] for found in alike(ranks)}) == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plain_loop_spends_the_privacy_that_attach_does(ranks: int) -> None:
    """Noise is drawn afresh everywhere, so parameters differ; as many means are taken, of as many bytes."""
    for found in alike(ranks):
        assert len({each["digest"] for each in found[PRIVATE]}) == 3
        attached, loop, pieces = ({what: each[what] for what in each if what != "digest"} for each in found[PRIVATE])
        assert loop == pieces == attached
        assert epsilon(noise=1.0, steps=loop["steps"], delta=1e-5) == epsilon(noise=1.0, steps=6, delta=1e-5) > 1


@pytest.mark.one_draw_in(2)
def test_a_session_is_saved_and_loaded_as_a_handle_is(tmp_path: Path) -> None:
    for whole, broken in run("saved_and_loaded", 2, folder=str(tmp_path)):
        assert whole == broken


def test_ranks_that_differ_are_told_in_what_and_which() -> None:
    everywhere = run("disagreeing", 3)
    for found in everywhere:
        assert found == {name: found[name] | {"s": found[name]["s"]} for name in everywhere[0]}
        assert all(each["s"] < 20 for each in found.values())
        told = {name: each["text"] for name, each in found.items()}
        whole = "(2, 3) torch.float32 on cpu"
        assert told["name"].endswith(f"number 1 is 'z' {whole} on rank 2, and 'y' {whole} on rank 0")
        assert "'y' (3, 2) torch.float32 on cpu on rank 2, and 'y' (2, 3)" in told["shape"]
        assert "'y' (2, 3) torch.float16 on cpu on rank 2" in told["dtype"]
        assert "number 0 is 'y'" in told["order"]
        assert "number 1 is nothing on rank 2, and 'y'" in told["fewer"]
        assert "the method: rank 2 has int8, seed=0, checksum=False" in told["method"]
        assert "and rank 0 has int4, seed=0" in told["method"]
        assert "grain_numel=" in told["grains"]


def test_the_link_is_timed_when_all_ranks_ask_for_it() -> None:
    for before, after in run("timed_later", 2):
        assert before[:2] == [False, False]
        assert before[2].endswith("or where the link was not timed")
        assert after[:2] == [True, True]


def test_ranks_time_the_link_together_or_not_at_all() -> None:
    said = run_function(f"{CASES}:timing_differs", 2, {}, 120, environments=[{}, {"GRADWIRE_TIME_LINK": "1"}])
    assert len(set(said)) == 1
    assert "rank 0 has int4, seed=0, checksum=False, the link is not timed" in said[0]


def test_a_tensor_left_out_on_one_rank_is_named_on_all() -> None:
    first, second, last = run("left_out", 3)
    assert last == "StepError: 'x' was not delivered: every rank gives all tensors, zeros where it has none"
    for told in (first, second):
        assert "CommunicationError: rank 2 failed with StepError: 'x' was not delivered" in told


def test_a_step_goes_on_in_the_background() -> None:
    everywhere = run("in_the_background", 2)
    assert everywhere == [[0.5] * 4] * 2


def test_a_step_goes_on_with_all_its_tensors_only(session: Session) -> None:
    given = tensors()
    with session.step() as step:
        step.deliver("a", given["a"])
        with pytest.raises(StepError, match="'b' was not delivered"):
            step.go_on()
        step.deliver("b", given["b"])
    assert session.stats().steps == 1


def test_errors_of_a_smaller_group_give_the_numbers_of_the_run(tmp_path: Path) -> None:
    outside, first, second = run("in_a_group", 3, folder=str(tmp_path))
    assert outside == {}
    for told in (first, second):
        assert "gradwire.save failed on rank 2, and changed nothing on any" in told["folder"]
        assert "rank 2 has step 3 and rank 1 1: call gradwire.save on every rank" in told["steps"]
        assert "rank 2 finds no gradwire-1/manifest.json" in told["load"]
    assert "rank 2 has not come to gradwire.save within 1 s" in first["absent"]


# One rank, in this process ----------------------------------------------------------------------------------------


@pytest.fixture
def session(one_rank: None) -> Iterator[Session]:
    with Session({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, "none", deadline_s=5) as made:
        yield made


def tensors() -> dict[str, Tensor]:
    return {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([[1.0, 2], [3, 4]])}


def test_tensors_are_reduced_in_place_wherever_their_elements_lie(session: Session) -> None:
    given = {"a": torch.arange(6.0)[::2], "b": torch.tensor([[1.0, 2], [3, 4]]).T}
    before = {name: tensor.clone() for name, tensor in given.items()}
    session.reduce_(given)
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name])
    assert not given["b"].is_contiguous()


def test_a_model_without_some_gradients_counts_as_zero_there(one_rank: None) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    second.requires_grad_(False)
    network = nn.Sequential(first, second)
    with Session(network, "int4", deadline_s=5) as made:
        assert list(made.names) == ["0.weight", "0.bias"]
        first(torch.ones(1, 2)).sum().backward()
        first.bias.grad = None
        made.reduce_(network)
    assert first.bias.grad is not None
    assert first.weight.grad is not None
    assert torch.equal(first.bias.grad, torch.zeros(2))
    assert bool(first.weight.grad.any())


WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"b": None}, "'b' was not delivered: every rank gives all tensors"),
    "unknown": ({"c": torch.zeros(1)}, "'c' is none of this session's 2 tensors"),
    "shape": ({"a": torch.zeros(4)}, r"'a' is \(4,\) torch.float32 on cpu, and was planned as \(3,\)"),
    "dtype": ({"a": torch.zeros(3).double()}, "'a' is .*float64.* planned as .*float32"),
    "device": ({"a": torch.zeros(3, device="meta")}, "'a' is .* on meta, and was planned as .* on cpu"),
    "expanded": ({"a": torch.ones(1).expand(3)}, "'a' is an expanded tensor, whose elements share memory"),
    "sparse": ({"a": torch.zeros(3).to_sparse()}, "only dense tensors can be combined"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tensors_are_named_and_the_next_step_goes_on(session: Session, wrong: str) -> None:
    others, told = WRONG[wrong]
    given = {name: tensor for name, tensor in {**tensors(), **others}.items() if tensor is not None}
    with pytest.raises(StepError, match=told):
        session.reduce_(given)
    given = tensors()
    session.reduce_(given)
    assert torch.equal(given["a"], tensors()["a"])
    assert session.stats().steps == 1


def test_a_trace_has_spans_of_what_a_step_did(session: Session) -> None:
    traced = session.trace()
    session.reduce_(tensors())
    kinds = [span.kind for span in traced.spans]
    assert {"encode", "decode", "wire", "wait"} == set(kinds)
    assert all(span.ended_s >= span.began_s for span in traced.spans)
    assert sum(span.nbytes for span in traced.spans if span.kind == "wire") == session.stats().payload_bytes
    again = session.trace()
    session.reduce_(tensors())
    assert len(traced.spans) == len(kinds) == len(again.spans)
    with session.step() as step:
        with pytest.raises(StepError, match="a step of this session is under way"):
            session.trace()
        step.deliver_all(tensors())


def test_one_element_may_have_a_stride_of_zero(one_rank: None) -> None:
    """As an expanded one has, but it shares its memory with no other."""
    given = torch.tensor(3.0).expand(1)
    with gradwire.Session({"a": torch.zeros(1)}, "none", deadline_s=10) as session:
        session.reduce_({"a": given})
    assert given.stride() == (0,)
    assert given.tolist() == [3.0]


def test_a_tensor_is_delivered_once_a_step(session: Session) -> None:
    given = tensors()

    def twice() -> None:
        with session.step() as step:
            step.deliver("a", given["a"])
            step.deliver("a", given["a"])

    with pytest.raises(StepError, match="'a' was delivered already in this step"):
        twice()
    with pytest.raises(CommunicationError, match="communication failed in an earlier step"):
        session.reduce_(tensors())


def test_a_step_has_a_beginning_and_an_end(session: Session) -> None:
    with pytest.raises(StepError, match="deliver inside of"):
        session.step().deliver("a", torch.zeros(3))
    given = tensors()
    with session.step() as step:
        step.deliver_all(given)
        with pytest.raises(StepError, match="a step of this session is under way"):
            session.reduce_(tensors())
    ended: SessionStep = step
    with pytest.raises(StepError, match="a step is not under way"):
        ended.deliver("a", given["a"])
    session.reduce_(tensors())
    assert session.engine._results == {}  # pyright: ignore[reportPrivateUsage]


def test_what_attach_returns_is_a_session_that_ddp_feeds_alone(one_rank: None) -> None:
    with gradwire.attach(DistributedDataParallel(torch.nn.Linear(3, 2)), "int4", seed=3) as attached:
        assert isinstance(attached, Session)
        assert attached.session is attached  # as a handle of before had one
        assert (attached.method, attached.seed, attached.stats().steps) == ("int4", 3, 0)
        for call in (attached.step, lambda: attached.reduce_({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})):
            with pytest.raises(StepError, match=r"fed by the backward pass of a DistributedDataParallel model: make a"):
                call()


def test_a_step_is_used_once_and_keeps_no_gradient(session: Session) -> None:
    step = session.step()
    with step:
        given = tensors()
        step.deliver_all(given)
    alive = weakref.ref(given["a"])
    del given
    gc.collect()
    assert alive() is None
    with pytest.raises(StepError, match="a step is used once"):
        step.__enter__()
    session.reduce_(tensors())


@pytest.mark.parametrize("method", ["int8", "powersgd:1"])
def test_what_another_engine_has_replaced_is_freed_at_once(one_rank: None, method: str) -> None:
    """Its states are as large as the model, and collections of circles are rare in a training loop."""
    with Session({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, method) as made:
        made.reduce_(tensors())
        gc.collect()
        gc.disable()
        try:
            first = weakref.ref(made.engine)
            settings = OverlapSettings(waves_in_flight=1)
            made.adopt(settings, made.remade(settings))
            assert first() is None
            made.reduce_(tensors())
            second = weakref.ref(made.engine)
            made.change("int4")
            made.reduce_(tensors())
            assert second() is None
        finally:
            gc.enable()


def test_a_session_that_is_closed_within_a_step_says_so_at_once(one_rank: None) -> None:
    made = Session({"a": torch.zeros(3)}, "none", deadline_s=30)

    def closing() -> None:
        with made.step() as step:
            step.deliver("a", torch.zeros(3))
            made.close()

    began = time.monotonic()
    with pytest.raises(StepError, match="this session was closed while a step was under way"):
        closing()
    assert time.monotonic() - began < 20


def test_the_link_is_not_measured_within_a_step(session: Session) -> None:
    with session.step() as step:
        with pytest.raises(StepError, match="a step of this session is under way"):
            session.measure_link()
        step.deliver_all(tensors())


def test_one_thread_at_a_time(session: Session) -> None:
    told: list[BaseException] = []

    def other() -> None:
        try:
            session.reduce_(tensors())
        except StepError as error:
            told.append(error)

    with session.step() as step:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        step.deliver_all(tensors())
    assert "here or in another thread" in str(told[0])


def test_a_closed_session_says_so(one_rank: None) -> None:
    made = Session({"a": torch.zeros(3)}, "none", deadline_s=5)
    made.close()
    made.close()
    with pytest.raises(StepError, match="this session is closed: make a new one"):
        made.reduce_({"a": torch.zeros(3)})


def test_what_cannot_be_served_is_refused(one_rank: None) -> None:
    with pytest.raises(AttachError, match=r"'a' has dtype .*int64; supported are"):
        Session({"a": torch.zeros(3, dtype=torch.int64)}, "none")
    with pytest.raises(AttachError, match="'a' is on meta; supported devices are cpu and cuda"):
        Session({"a": torch.zeros(3, device="meta")}, "none")
    with pytest.raises(AttachError, match="there is nothing to combine"):
        Session({}, "none")
    with pytest.raises(AttachError, match=r"parameters 'w' and '_orig_mod.w' are both 'w'"):
        Session(Clash(), "none")
    with pytest.raises(gradwire.CompositionError, match="needs at least"):
        Session({"a": torch.zeros(3)}, "krum:1")


class Clash(nn.Module):
    """Two parameters whose names differ by what `torch.compile` puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self._orig_mod = nn.Module()
        self._orig_mod.w = nn.Parameter(torch.zeros(5))


def test_a_closed_session_cannot_be_saved(one_rank: None, tmp_path: Path) -> None:
    made = Session({"a": torch.zeros(3)}, "none", deadline_s=5)
    made.close()
    with pytest.raises(gradwire.StateError, match=r"gradwire.save: this session is closed"):
        gradwire.save(tmp_path, made)


def test_what_fails_while_a_session_is_made_is_told_to_others(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []

    def explain(board: FailureBoard, error: BaseException, where: str = "") -> BaseException:
        told.append(error)
        return error

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(FailureBoard, "explain", explain)
    monkeypatch.setattr("gradwire.session.making.dry_run", fails)
    with pytest.raises(MemoryError, match="no room"):
        Session({"a": torch.zeros(3)}, "none", deadline_s=5)
    assert [type(error) for error in told] == [MemoryError]


@pytest.mark.parametrize("spec", ["int4", "topk:0.5", "powersgd:1", "none"])
def test_a_session_may_be_made_used_and_loaded_in_inference_mode(one_rank: None, spec: str) -> None:
    with torch.inference_mode():
        given = {"a": torch.ones(300), "b": torch.ones(8, 8).T, "c": torch.ones(4, 3, 2).permute(2, 0, 1)}
        made = Session(given, spec, deadline_s=5)
        made.reduce_(given)
        made.load_state_dict(made.state_dict())
    made.reduce_({name: torch.ones(tensor.shape) for name, tensor in given.items()})
    with torch.inference_mode():
        made.reduce_(given)
    assert made.stats().steps == 3
    made.close()


def test_a_model_is_named_again_only_after_a_change(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    network, asked = nn.Linear(2, 2), list[str]()
    monkeypatch.setattr(names, "canonical_name", lambda name: asked.append(name) or name)  # type: ignore[func-returns-value]
    with Session(network, "none", deadline_s=5) as made:
        for _ in range(5):
            made.reduce_(network)
        assert len(asked) == 4  # once for the plan, once for the first step
        network.weight = nn.Parameter(torch.zeros(2, 2))
        network.weight.grad = torch.ones(2, 2)
        made.reduce_(network)
        assert len(asked) == 6
        network.bias.requires_grad_(False)
        with pytest.raises(StepError, match="'bias' requires no gradient any more"):
            made.reduce_(network)


def test_pieces_count_as_the_buckets_that_ddp_would_make(session: Session) -> None:
    session.reduce_(tensors())
    assert len(session.window._buckets) == 1  # pyright: ignore[reportPrivateUsage]
    with session.step() as step:
        for name, tensor in tensors().items():
            step.deliver(name, tensor)
    assert len(session.window._buckets) == 1  # pyright: ignore[reportPrivateUsage]
    assert 0 <= session.stats().exposed_s < 60


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(AttachError, match="there is no default process group: call torch"):
        Session({"a": torch.zeros(3)}, "none")


def test_a_gradient_that_is_not_finite_is_warned_about_once(session: Session) -> None:
    given = tensors()
    given["a"][0] = float("nan")
    for _ in range(12):
        session.reduce_({name: tensor.clone() for name, tensor in tensors().items()})
    with Session({"a": torch.zeros(3)}, "int4", deadline_s=5) as made:
        with pytest.warns(NonFiniteWarning):
            made.reduce_({"a": given["a"].clone()})
        made.reduce_({"a": given["a"].clone()})
        assert made.stats().bad_steps == 2


def test_a_forgotten_session_lets_go(one_rank: None) -> None:
    made = Session({"a": torch.zeros(3)}, "none", deadline_s=5)
    thread = made.lane.executor._thread  # type: ignore[union-attr]
    del made
    thread.join(10)
    assert not thread.is_alive()
