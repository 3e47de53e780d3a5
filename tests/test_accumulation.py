"""Accumulation: one exchange a window, losses weighted by all tokens, whole windows or none, and a warning."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from framework_runs import EXAMPLES, run_two
from gradwire.core.errors import AttachError, StepError
from gradwire.drivers.engine import Stats
from gradwire.ranks.supervised import RankFailure, run_function
from gradwire.session.repeated import RepeatedExchanges

CASES = str(Path(__file__).with_name("accumulation_cases.py"))
DEADLINE_S = 600
ROUNDING = 1e-13
"""Parameters of about 1 in float64 after three steps, summed in other orders."""


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, DEADLINE_S)


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.turns("big batches", 1)
def test_windows_equal_the_big_batch_of_all_ranks(ranks: int) -> None:
    for found in run("equal_to_big_batch", ranks):
        assert {name: off for name, off in found.items() if not off < ROUNDING} == {}


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_that_a_loop_delivers_equal_the_big_batch(ranks: int) -> None:
    assert max(run("delivered", ranks)) < ROUNDING


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.turns("big batches", 1)
def test_sharded_models_equal_the_big_batch(ranks: int) -> None:
    for found in run("sharded", ranks):
        assert {name: off for name, off in found.items() if not off < ROUNDING} == {}


def test_optimizers_that_are_compression_get_the_gradient_of_the_big_batch() -> None:
    assert max(run("stepped", 2)) < 1e-5  # of parameters of about 1 in float32


def test_models_that_are_averaged_step_by_the_mean_of_their_own_tokens() -> None:
    assert max(run("own_tokens", 2)) < ROUNDING


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["sent", "sent_by_shards"])
@pytest.mark.turns("big batches", 1)
def test_a_window_of_8_micro_batches_sends_an_eighth(case: str, ranks: int) -> None:
    for found in run(case, ranks):
        for name, (once, each) in found.items():
            assert once > 0, name
            assert each / once == pytest.approx(8, rel=0.02), name  # beside gradients, the tokens of all ranks


def test_methods_get_whole_gradients() -> None:
    assert all(run("compressed", 2))


def test_rules_combine_the_means_of_each_rank() -> None:
    assert max(run("rules", 3)) < ROUNDING


@pytest.mark.parametrize("name", ["unwrapped", "reduced"])
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_a_rank_that_raises_spoils_no_other_window(name: str, at: int) -> None:
    *others, last = run("raising", 2, name=name, at=at)
    assert last["told"] == "ValueError: no batch today"
    for other in others:
        assert other["told"].startswith("StepError: rank 1 has left this window")
    assert all(found["off"] < ROUNDING for found in (*others, last))


@pytest.mark.parametrize("name", ["ddp", "attached"])
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_a_rank_of_ddp_that_raises_is_named_and_nobody_waits_for_it(name: str, at: int) -> None:
    with pytest.raises(RankFailure, match="no batch today") as caught:
        run("uncaught", 2, name=name, at=at)
    assert (caught.value.rank, caught.value.status) == (1, 1)


def test_what_shards_have_added_up_is_dropped_by_an_exception() -> None:
    for found in run("sharded_raising", 4):
        assert all(off < ROUNDING for off in found.values()), found


def test_what_is_wrong_on_one_rank_is_raised_on_all() -> None:
    first, second = run("wrong", 2)
    for found in (first, second):
        assert "no micro-batch in this window" in found["empty"]
        assert "no micro-batch of this window has a token" in found["no token"]
        assert float(found["off"]) < ROUNDING
    for name in ("negative", "raises", "too few"):
        assert first[name].startswith("StepError: a rank could not count the tokens")
    assert "counts -1.0 tokens: give a number that is 0 or more" in second["negative"]
    assert second["raises"] == "KeyError: 'labels'"
    assert "give one for each" in second["too few"]


def test_fsdp2_wants_equally_many_micro_batches() -> None:
    for told in run("uneven_shards", 2):
        assert told.startswith("ranks have different numbers of micro-batches")


def test_what_does_not_fit_a_model_of_several_ranks_is_refused() -> None:
    for divisors, keeps, across, alone in run("refused_shards", 2):
        assert "parts of this model divide their gradients by different numbers (2, 8)" in divisors
        assert keeps.startswith("keep_sharded=True is for a model that fully_shard was given a mesh of two dimensions")
        assert across.startswith("across_ranks=False is for models that are averaged")
        assert alone.startswith("accumulate cannot see what combines the gradients of a Sequential")


@pytest.mark.parametrize("name", ["ddp", "unwrapped"])
def test_a_loop_that_ends_early_is_told_and_the_next_window_is_whole(name: str) -> None:
    (first, off), (second, off_too) = run("left_early", 2, name=name)
    assert max(off, off_too) < ROUNDING
    early = "the block of gradwire.accumulate ended after 1 of 4 micro-batches"
    assert second.startswith(early)
    assert first.startswith(early if name == "ddp" else "rank 1 has left")


def test_a_rank_that_has_gone_is_no_hang() -> None:
    assert run("dead", 2) == ["CommunicationError", "gone"]


@pytest.mark.one_draw_in(3)
def test_the_example_learns_and_exchanges_once_a_step(tmp_path: Path) -> None:
    said = run_two([str(EXAMPLES / "accumulate.py"), "--steps", "20"], tmp_path)
    first, second = said.parameters
    assert first == second
    after_10, after_20 = (float(loss) for loss in re.findall(r"loss (\S+) a token", said.logs[0]))
    assert after_20 < after_10 < math.log(64)  # which is that of words that are drawn
    for log, (sent, dense) in zip(said.logs, said.bytes_sent, strict=True):
        assert "in 20 steps" in log
        assert dense / sent > 5


# The warning ------------------------------------------------------------------------------------------------------


@pytest.mark.draw(2)
@pytest.mark.parametrize("name", ["attached", "unwrapped", "reduced", "fsdp2"])
def test_a_loop_that_exchanges_every_micro_batch_is_told_once_what_it_sends(name: str) -> None:
    for told in run("repeated", 2, name=name):
        (text,) = told
        assert "exchanged in each of 4 backward passes before one step" in text
        sent, once = (float(number) for number in re.findall(r"([\d.]+) kB", text))
        assert sent == pytest.approx(4 * once, rel=0.01)


@pytest.mark.draw(2)
@pytest.mark.parametrize("name", ["attached", "unwrapped", "reduced"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_with_one_exchange_a_step_is_not_told(name: str, to_none: bool) -> None:
    assert run("not_repeated", 2, name=name, to_none=to_none) == [0, 0]


def test_gradients_that_are_made_anew_without_a_step_are_not_accumulated() -> None:
    parameter, repeated = torch.nn.Parameter(torch.ones(3)), RepeatedExchanges()
    for _ in range(6):
        parameter.grad = torch.ones(3)
        repeated.exchanged([parameter], Stats)


def test_a_step_that_a_loss_scaler_skips_is_not_accumulated() -> None:
    parameter, repeated = torch.nn.Parameter(torch.ones(3)), RepeatedExchanges()
    optimizer = torch.optim.SGD([parameter], 0.1)
    parameter.grad = torch.ones(3)
    for step in range(8):
        repeated.exchanged([parameter], Stats)
        if step != 4:  # where the scaler has found no infinity
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)


# One process ------------------------------------------------------------------------------------------------------


def test_a_window_is_used_once_and_in_its_block() -> None:
    model = torch.nn.Linear(2, 1)
    window = gradwire.accumulate(model, [torch.ones(1, 2)], [1.0])
    with pytest.raises(StepError, match="has not begun"):
        _ = window.tokens
    with window:
        with pytest.raises(StepError, match="inside of the loop"):
            window.loss(torch.ones(()))
        for x in window:
            assert (window.tokens, window.is_last) == (1.0, True)
            window.loss(model(x).sum()).backward()
    with pytest.raises(StepError, match="used once"), window:
        pass


@pytest.mark.parametrize("tokens", [[None], ["many"], [torch.ones(2)], [float("nan")], [-1]])
def test_a_count_that_is_no_number_is_told(tokens: Any) -> None:
    with pytest.raises(StepError, match=r"micro-batch 0 counts .* tokens: give a number"):
        gradwire.accumulate(torch.nn.Linear(2, 1), [torch.ones(1, 2)], tokens).__enter__()


def test_losses_that_are_not_summed_and_a_second_loop_are_told() -> None:
    model = torch.nn.Linear(2, 1)
    with gradwire.accumulate(model, [torch.ones(3, 2)], [3]) as window:
        for x in window:
            with pytest.raises(StepError, match=r"takes a sum of token losses, and this tensor has shape \(3, 1\)"):
                window.loss(model(x))
            window.loss(model(x).sum()).backward()
        with pytest.raises(StepError, match="gone through once"):
            next(iter(window))


def test_a_micro_batch_without_its_loss_is_told() -> None:
    model = torch.nn.Linear(2, 1)

    def without_loss() -> None:
        with gradwire.accumulate(model, [torch.ones(1, 2)] * 2, [1, 1]) as window:
            for x in window:
                model(x).sum().backward()

    with pytest.raises(StepError, match=r"window\.loss was not called"):
        without_loss()
    assert model.weight.grad is None


def test_an_interrupt_asks_no_other_rank() -> None:
    model = torch.nn.Linear(2, 1)

    def interrupted() -> None:
        with gradwire.accumulate(model, [torch.ones(1, 2)] * 2, [1, 1]) as window:
            for x in window:
                window.loss(model(x).sum()).backward()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert model.weight.grad is None


def test_a_closed_session_is_refused(one_rank: None) -> None:
    session = gradwire.Session(torch.nn.Linear(2, 1), "none", deadline_s=5)
    session.close()
    with pytest.raises(StepError, match="this session is closed: make a new one"):
        gradwire.accumulate(session, [], [])


def test_what_cannot_be_accumulated_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(AttachError, match="keep_sharded= is for models of fully_shard"):
        gradwire.accumulate(model, [], [], keep_sharded=True)
    with pytest.raises(AttachError, match="gradients of a SGD: pass the DistributedDataParallel"):
        gradwire.accumulate(torch.optim.SGD(model.parameters()), [], [])
