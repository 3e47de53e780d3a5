"""`gradwire.parallel.pipelines`: stages against one process, what they send, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from gradwire.codecs import BlockInt
from gradwire.core.errors import GradwireError
from gradwire.drivers.cost import asked_by
from gradwire.network import Network
from gradwire.parallel.pipelines import SCHEDULES, SampleMemory, ScheduleShape, StageCodecs
from gradwire.parallel.pipelines.messages import step_messages
from gradwire.planning.messages import between_stages
from gradwire.ranks.supervised import RankFailure, run_function
from namespaces import needs_namespaces

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not hasattr(PipelineStage, "_warmup_forward_vote"), reason="pipelines need PyTorch 2.13"),
]
CASES = str(Path(__file__).with_name("pipeline_cases.py"))


def run(name: str, ranks: int, **args: Any) -> list[Any]:
    return run_function(f"{CASES}:{name}", ranks, args, deadline_s=300)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_gives_what_one_process_gives(ranks: int) -> None:
    found = run("every_schedule", ranks, names=list(SCHEDULES), micro_batches=8)
    for name in SCHEDULES:
        assert max(of_rank[name]["distance"] for of_rank in found) < 1e-12, name
        assert sum(of_rank[name]["has_output"] for of_rank in found) == 1


@pytest.mark.one_draw_in(4)
def test_eight_ranks_give_what_one_process_gives() -> None:
    found = run("every_schedule", 8, names=["1F1B", "ZBVZeroBubble"], micro_batches=16)
    assert all(of_schedule["distance"] < 1e-12 for of_rank in found for of_schedule in of_rank.values())


def test_shapes_may_be_found_by_pytorch() -> None:
    found = run("against_twin", 2, schedule="1F1B", micro_batches=4, static=False)
    assert max(of_rank["distance"] for of_rank in found) < 1e-12


def test_fewer_micro_batches_than_ranks_work_and_the_bubble_is_told() -> None:
    found = run("few", 4)
    assert max(of_rank["distance"] for of_rank in found) < 1e-12
    assert len(found[0]["said"]) == 1
    assert "2 micro-batches on 4 ranks: ranks wait 60% of each step" in found[0]["said"][0]


def test_compressed_stages_do_what_rounding_in_one_process_does() -> None:
    assert max(run("straight_through", 2, codec="int8")) < 1e-12


@pytest.mark.parametrize(("dtype", "least"), [("float32", 3.9), ("bfloat16", 1.9)])
def test_int8_sends_as_little_as_it_says(dtype: str, least: float) -> None:
    width, micro_batches = 512, 4
    first, second = run("compressed", 2, schedule="1F1B", codec="int8", width=width, dtype=dtype)
    elements = 2 * width
    assert first["sent"] == micro_batches * (elements + 4 * elements / 256)
    assert second["sent"] == micro_batches * 2 * elements
    assert (
        torch.empty(0, dtype=getattr(torch, dtype)).element_size() * elements * micro_batches >= least * first["sent"]
    )
    assert 0 < first["error"] < 0.02


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("codec", ["int4", "fp8"])
def test_bytes_are_those_of_the_formula(schedule: str, codec: str) -> None:
    found = run("compressed", 2, schedule=schedule, codec=codec, width=40, dtype="float32")
    shape, like = ScheduleShape(schedule, 2, 4), torch.empty(2, 40)
    for rank, of_rank in enumerate(found):
        program = step_messages(shape, rank, StageCodecs.of(codec), [like])
        assert of_rank["sent"] == sum(request.nbytes for request in asked_by(program, 2, rank))


def test_messages_without_a_codec_are_those_that_the_planner_prices() -> None:
    like = torch.empty(3, 5, dtype=torch.bfloat16)
    mine = asked_by(step_messages(ScheduleShape("1F1B", 2, 1), 0, StageCodecs.of("none"), [like]), 2)
    assert [request.nbytes for request in mine] == [request.nbytes for request in between_stages(15, 2, 1)]


@pytest.mark.one_draw_in(4)
def test_the_interface_counts_what_stages_say() -> None:
    needs_namespaces()
    with Network(2, "1gbit") as network:
        found = run_function(f"{CASES}:counted", 2, {"codec": "int8"}, deadline_s=300, network=network)
    for of_rank in found:
        assert abs(of_rank["counted"] / of_rank["sent"] - 1) < 0.03, of_rank


def test_changes_of_samples_lose_less_with_each_epoch() -> None:
    """Of activations that do not change: what was lost of them is sent the next time, with ever finer steps."""
    (_, with_memory), (_, without) = (
        run("remembered", 2, codec="int4", epochs=4, first=first) for first in ("int4", None)
    )
    assert all(later < earlier / 5 for earlier, later in itertools.pairwise(with_memory["errors"]))
    assert min(without["errors"]) > 0.9 * with_memory["errors"][0] > 0.01


def test_what_changes_of_samples_take_is_the_formula() -> None:
    first, second = run("remembered", 2, codec="int4", epochs=2)
    elements = 2 * 64  # of a micro-batch, of which there are four in an epoch
    assert first["sent"] == [4 * (8 + 4 * elements), 4 * (8 + BlockInt(4).payload_bytes(elements))]
    assert first["kept"] == second["kept"] == 8 * 64 * 4


def test_ends_that_mean_other_samples_are_told() -> None:
    with pytest.raises(RankFailure, match="two stages mean other samples by one micro-batch"):
        run("remembered", 2, codec="int4", epochs=1, others=True)


def test_ddp_reduces_under_every_schedule() -> None:
    found = run("with_ddp", 4, names=list(SCHEDULES))
    assert {name: max(of_rank[name] for of_rank in found) < 1e-12 for name in SCHEDULES} == dict.fromkeys(
        SCHEDULES, True
    )


def test_schedules_that_split_backward_passes_lose_the_hooks_of_ddp() -> None:
    """What the stage cures; the whole backward passes at the end of DualPipeV's steps may call them."""
    found = run("with_ddp", 4, names=["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"], plain=True)
    lost = {name for name in found[0] if max(of_rank[name] for of_rank in found) > 1e-6}
    assert lost == {"InterleavedZeroBubble", "ZBVZeroBubble"}


REFUSED = {
    "codec": "ranks disagree on the codec of activations: rank 1 has",
    "shapes": r"stage 0 gives \[2, 6\] of float64, and stage 1 waits for \[2, 7\] of float64",
    "empty": "micro-batch 0 of stage 0 is empty",
    "smaller": r"stage 0 is given \[1, 6\] of float64 in micro-batch 3, and the pipeline was set up for \[2, 6\]",
}


@pytest.mark.parametrize("fault", ["codec", "shapes"])
def test_ranks_that_disagree_are_told_so_before_anything_is_sent(fault: str) -> None:
    for said in run("refused", 2, fault=fault):
        assert re.search(REFUSED[fault], said)


@pytest.mark.parametrize("fault", ["empty", "smaller"])
def test_batches_that_do_not_fit_are_refused_where_they_are_given(fault: str) -> None:
    assert re.search(REFUSED[fault], run("refused", 2, fault=fault)[0])


@pytest.mark.parametrize(
    ("activations", "backwards", "said"),
    [
        ("powersgd:2", None, "codec"),
        ("int4,ef=on", None, "a residual is that of other samples"),
        ("int4,exchange=allgather", None, "exchange in 'int4,exchange=allgather' belongs to exchanges of gradients"),
        ("int8", "int4", "gradients between stages stand less than activations do"),
    ],
)
def test_codecs_that_cannot_serve_are_refused(activations: str, backwards: str | None, said: str) -> None:
    with pytest.raises(GradwireError, match=said):
        StageCodecs.of(activations, backwards)


def test_samples_are_refused_where_they_do_not_fit() -> None:
    memory = SampleMemory()
    with pytest.raises(GradwireError, match="a batch has a sample twice"):
        memory.next_batch([1, 1])
    with pytest.raises(GradwireError, match="next_batch has named 0 samples"):
        memory.coder(BlockInt(4), torch.empty(2, 3), (0, 0), 0, 1)
    memory.next_batch(torch.tensor([4, 5]))
    with pytest.raises(GradwireError, match="would grow without bound"):
        memory.coder(BlockInt(4, stochastic=True), torch.empty(2, 3), (0, 0), 0, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_send_and_recv_give_what_one_process_gives(ranks: int) -> None:
    assert max(run("sent_and_received", ranks)) < 1e-12


def test_send_and_recv_round_by_their_codecs() -> None:
    gradient, received = run("rounded", 2)
    assert received == [0.0, 7.0, -3.0, 1.0]
    assert gradient == torch.tensor([1.0, 2.0, 3.0, 0.1]).half().tolist()
