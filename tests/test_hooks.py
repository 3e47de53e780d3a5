"""`gradwire.hooks` against PyTorch's own hooks, and where those do not work."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

from gradwire import hooks
from gradwire.codecs import AffineInt
from gradwire.core.errors import CompositionError, StateError
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("hook_cases.py"))

PAIRS = [
    *("allreduce", "fp16", "noop", "fp16 wrapper", "fp16 wrapper around PyTorch's", "power", "power late"),
    *("power rank 3", "power without feedback", "power without warm start", "power batched draws"),
]


def run(case: str, ranks: int = 2, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 240)


@pytest.fixture(scope="module")
def behaved() -> list[dict[str, Any]]:
    return run("behaviours")


@pytest.fixture(scope="module")
def compared(behaved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["compare"] for found in behaved]


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("name", PAIRS)
def test_parameters_after_20_steps_are_pytorchs_to_rounding(compared: list[dict[str, Any]], name: str) -> None:
    # Rounding's yardstick: how far PyTorch's own hook ends from itself if parameters start two units in the last
    # place away. Our sums and products round differently in every step, hence the factor.
    for found in compared:
        assert found[name]["distance"] <= 3 * found[name]["yardstick"]
        assert found[name]["distance"] <= 1e-3 * found[name]["moved"]
    if name != "noop":
        assert compared[0][name]["digest"] == compared[1][name]["digest"]


def test_compression_is_counted_as_in_pytorch(compared: list[dict[str, Any]]) -> None:
    mine, theirs = compared[0]["power"]["stats"]
    assert mine == pytest.approx(theirs)


# How far parameters may end from those of uncompressed training, as a fraction of the way they went.
LOSSES = {
    "allreduce": 1e-5,
    "fp16": 1e-2,
    "bf16": 5e-2,
    "bf16 wrapper": 5e-2,
    "per tensor": 2e-1,
    "per channel": 1e-1,
    "power 0": 0.5,
    "power 1": 0.5,
    "power 2": 0.5,
    "batched": 1.0,
    "fp16 power": 0.5,
    "bf16 power": 0.5,
}


@pytest.mark.parametrize("name", LOSSES)
def test_several_buckets_on_gloo(behaved: list[dict[str, Any]], name: str) -> None:
    first, second = (found["several_buckets"][name] for found in behaved)
    assert first["digest"] == second["digest"]
    assert first["error"] < LOSSES[name]


def test_sixteen_bit_factors_halve_the_wire(behaved: list[dict[str, Any]]) -> None:
    found = behaved[0]["several_buckets"]
    # the ranks' agreement on non-finite gradients, a byte a grain and step, is not halved
    agreement = 20 * 10
    assert found["fp16 power"]["payload"] <= 0.5 * found["power 2"]["payload"] + agreement


def test_powersgd_is_the_same_in_one_bucket_or_many(behaved: list[dict[str, Any]]) -> None:
    assert all(found["one_or_many"]["equal"] for found in behaved), behaved[0]["one_or_many"]


def test_an_infinite_step_is_skipped_and_forgotten(behaved: list[dict[str, Any]]) -> None:
    for found in behaved:
        assert found["infinite"]["kept"] == [step != 5 for step in range(20)]
        assert found["infinite"]["finite"]
        assert found["infinite"]["bad_steps"] == 1
    assert behaved[0]["infinite"]["digest"] == behaved[1]["infinite"]["digest"]


@pytest.mark.parametrize(
    ("case", "moved"),
    [("zero", [False] * 4 + [True] * 3), ("unused", [True, False, False, True, True])],
)
def test_a_layer_without_gradient(behaved: list[dict[str, Any]], case: str, moved: list[bool]) -> None:
    for found in behaved:
        assert found[case]["finite"]
        assert found[case]["moved"] == moved
    assert behaved[0][case]["digest"] == behaved[1][case]["digest"]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("how", ["hook", "attach"])
def test_what_unused_layers_owe_outlives_gradients_zeroed_in_place(
    behaved: list[dict[str, Any]], how: str, views: bool
) -> None:
    """What was given is delivered or owed, also where DDP drops the mean of a layer that no rank used."""
    for found in behaved:
        sums = found["conserved"][f"{how} {views}"]
        assert abs(sums["owed"]) > 0.1
        assert sums["given"] == pytest.approx(sums["delivered"] + sums["owed"], abs=1e-4)


@pytest.mark.parametrize("case", ["variants", "two_models"])
def test_ranks_end_bit_equal(behaved: list[dict[str, Any]], case: str) -> None:
    assert behaved[0][case] == behaved[1][case]


def test_a_resume_is_exact(behaved: list[dict[str, Any]]) -> None:
    for found in behaved:
        for resumed in found["resume"].values():
            assert len(set(resumed["ends"])) == 1
            assert resumed["iter"] == 20


def test_changed_settings_are_refused(behaved: list[dict[str, Any]]) -> None:
    assert all("make a new one" in found["changed"] for found in behaved)


def test_a_group_other_than_the_default() -> None:
    found = run("subgroup", 3)
    assert found[1] == found[2]
    assert len({f["all"] for f in found}) == 1


def test_an_error_in_a_program_reaches_every_rank_as_itself(behaved: list[dict[str, Any]]) -> None:
    assert all("UnluckyError: thirteen" in found["failure"] for found in behaved)


def test_state_refuses_nonsense() -> None:
    with pytest.raises(CompositionError, match="rank 0"):
        hooks.PowerSGDState(None, matrix_approximation_rank=0)
    with pytest.raises(StateError, match="version"):
        hooks.PowerSGDState(None).load_state_dict({})


def test_a_state_is_pickled_before_its_first_step() -> None:
    state = hooks.PowerSGDState(None, 3, random_seed=4)
    state.rng.randint(10)
    again: hooks.PowerSGDState = pickle.loads(pickle.dumps(state))
    assert (again.matrix_approximation_rank, again.iter) == (3, 0)
    assert np.array_equal(again.rng.randint(1000, size=5), state.rng.randint(1000, size=5))


@pytest.mark.parametrize("block", [0, 512])
@pytest.mark.parametrize("numel", [1, 511, 512, 1500])
def test_affine_bytes_are_those_of_torchs_observers(block: int, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) + 0.3
    rows = torch.nn.functional.pad(x, (0, -numel % block)).view(-1, block) if block else x.view(1, -1)
    observer = PerChannelMinMaxObserver() if block else MinMaxObserver()
    observer(rows)
    scale, zero = (value.view(-1, 1).float() for value in observer.calculate_qparams())
    expected = (((rows / scale).round() + zero).clamp(0, 255) - zero) * scale
    codec = AffineInt(block)
    decoded = codec.decode(codec.encode(x), x)
    # a value between two levels may fall to either, as scales differ in their last place
    step = scale.expand_as(rows).reshape(-1)[:numel]
    assert bool(((decoded - expected.reshape(-1)[:numel]).abs() <= step * 1.001).all())
    assert bool(((decoded - x).abs() <= step * 0.501 + 1e-6).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_affine_bytes_hide_no_infinity(value: float) -> None:
    x = torch.tensor([1.0, value, -2.0])
    decoded = AffineInt().decode(AffineInt().encode(x), x)
    assert not bool(decoded.isfinite().all())


def test_affine_bytes_of_tiny_and_huge_and_no_values() -> None:
    codec = AffineInt(block=4)
    for x in (torch.zeros(5), torch.full((3,), 1e-30), torch.tensor([-3e38, 3e38]), torch.empty(0)):
        decoded = codec.decode(codec.encode(x), x)
        torch.testing.assert_close(decoded, x, rtol=0.01, atol=0)
