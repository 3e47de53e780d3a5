"""Weights that ranks give in each step: the gradient of all samples at the bytes of a mean, and errors for all."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import StepError
from gradwire.cli.main import main
from gradwire.codecs import Identity, TopK
from gradwire.core.collective import ring_bytes
from gradwire.core.errors import CompositionError
from gradwire.core.grain import flat_grain
from gradwire.core.state import walk
from gradwire.drivers.lockstep import Lockstep
from gradwire.ranks.supervised import run_function
from gradwire.reducers import AllGatherExchange, AllReduceExchange, ErrorFeedback
from gradwire.reducers.aggregate import Weighted
from gradwire.spec import parse

CASES = str(Path(__file__).with_name("weight_cases.py"))
PORTS = ("ddp", "reduce", "deliver", "fsdp2")
REFUSING = ("ddp", "reduce", "fsdp2")
RESUMED = {"ddp": "int4,weights=given", "reduce": "topk:0.1,weights=given", "fsdp2": "int4,weights=given"}
STEPS = 4


@functools.cache
def outcomes(ranks: int) -> list[dict[str, Any]]:
    jobs: dict[str, Any] = {f"uneven {port}": ("uneven", {"port": port}) for port in PORTS}
    if ranks == 3:
        jobs |= {f"refused {port}": ("refused", {"port": port}) for port in REFUSING}
        jobs |= {"joined": ("joined", {}), "changed": ("changed", {}), "nobody": ("nobody_could", {})}
        folder = tempfile.mkdtemp()
        jobs |= {
            f"resumed {port}": ("resumed", {"port": port, "spec": spec, "folder": folder})
            for port, spec in RESUMED.items()
        }
    return run_function(f"{CASES}:many", ranks, {"jobs": jobs}, 240)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("port", PORTS)
@pytest.mark.draw(1)
def test_uneven_batches_give_the_gradient_of_all_samples_at_the_bytes_of_a_mean_and_a_number(
    port: str, ranks: int
) -> None:
    for found in outcomes(ranks):
        each = found[f"uneven {port}"]
        assert each["worst"] < 2e-6  # float32 against float64; equal weights would be off by more than 0.1
        plain, weighted = each["sent"]["none"], each["sent"]["none,weights=given"]
        assert weighted - plain == STEPS * ring_bytes(8, ranks)
        if each["cost"]:
            assert each["cost"] == {spec: sent // STEPS for spec, sent in each["sent"].items()}


SAID = {
    "negative": "rank 2 gave the weight -2: give a finite number",
    "nan": "rank 2 gave the weight nan: give a finite number",
    "infinite": "rank 2 gave the weight inf: give a finite number",
    "zero": "all ranks gave the weight 0 in this step",
    "huge": "add up to more than a float64 holds",
    "missing": "rank 2 did not say what it counts for in this step",
    "text": "rank 2 gave the weight nan: give a finite number",
}


@pytest.mark.parametrize("port", REFUSING)
@pytest.mark.parametrize("wrong", SAID)
def test_weights_that_make_no_mean_are_one_sentence_on_all_ranks(wrong: str, port: str) -> None:
    everywhere = [found[f"refused {port}"][wrong] for found in outcomes(3)]
    for found in everywhere:
        assert SAID[wrong] in found["text"]
        assert found["s"] < 15
    assert {found["kind"] for found in everywhere} == {"StepError"}
    assert len({found["text"] for found in everywhere}) == 1


@pytest.mark.parametrize("port", RESUMED)
def test_a_resumed_run_is_the_same_run(port: str) -> None:
    for found in outcomes(3):
        whole, broken = found[f"resumed {port}"]
        assert whole == broken


def test_a_rank_that_has_joined_counts_for_nothing() -> None:
    assert all(found["joined"] < 2e-6 for found in outcomes(3))


def test_a_method_with_weights_may_follow_one_without() -> None:
    for found in outcomes(3):
        assert "takes no weights: attach with weights=given" in found["changed"]["said"]
        assert found["changed"]["off"] < 1e-6


def test_weights_that_nobody_could_give_are_refused() -> None:
    for found in outcomes(3):
        windows, copies = found["nobody"]
        assert "nobody calls it for" in windows
        assert "write the weights of all ranks, as weights=3/1" in windows
        assert "weights=given does not go with replicate=" in copies


def test_a_script_that_nobody_changes_cannot_say_what_its_ranks_count_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "int4,weights=given", "train.py"]) == 2
    assert "needs a script that calls session.weigh() in each step" in capsys.readouterr().err


# Virtual ranks ---------------------------------------------------------------------------------------------------


def test_what_is_owed_of_weighted_gradients_is_delivered() -> None:
    """With changing weights the sum of all weighted means is what was delivered and what is owed."""
    grain = flat_grain(200)
    ranks = Lockstep(Weighted(ErrorFeedback(AllGatherExchange(TopK(0.05))), "given"), grain, 3)
    generator = torch.Generator().manual_seed(1)
    total, want = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    for step in range(30):
        weights = [1.0, 1.0 + step, 3.0 * (step % 2)]
        xs = [torch.randn(200, generator=generator) for _ in range(3)]
        ranks.weigh(weights)
        total += ranks.step(xs)[0].double()
        want += sum(w * x.double() for w, x in zip(weights, xs, strict=True)) / sum(weights)
    owed = (
        torch.stack([leaf.tensor.double() for state in ranks.states for _, leaf in walk(state) if leaf.owed]).sum(0) / 3
    )
    assert float(owed.abs().max()) > 0.1
    torch.testing.assert_close(total + owed, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "fp16", "int8,ef=off"])
def test_half_precision_overflows_only_where_the_mean_does(spec: str) -> None:
    ranks = Lockstep(parse(f"{spec},weights=given"), flat_grain(16, dtype=torch.float16), 2)
    ranks.weigh([3.0, 1.0])
    mean, _ = ranks.step([torch.full((16,), 60_000.0).half(), torch.full((16,), -60_000.0).half()])
    assert bool(((mean.float() - 30_000).abs() <= 30_000 * 2.0**-6).all())


def test_a_step_of_virtual_ranks_without_weights_is_refused() -> None:
    ranks = Lockstep(parse("none,weights=given"), flat_grain(4), 2)
    ranks.weigh([1.0, None])
    with pytest.raises(StepError, match="rank 1 did not say what it counts for"):
        ranks.step([torch.ones(4)] * 2)


def test_weights_are_numbers_or_given() -> None:
    with pytest.raises(CompositionError, match="or 'given' to be told in each step"):
        Weighted(AllReduceExchange(Identity()), "learned")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="weights have no meaning"):
        parse("median,weights=given")
    assert parse("none,weights=given").weighs
    assert not parse("none,weights=1/2").weighs
