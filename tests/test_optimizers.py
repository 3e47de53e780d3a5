"""Optimizers that are compression: all ranks go one way, that of one process where nothing is lost, and resume it."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import AttachError, Lockstep, NonFiniteWarning, StateError, StepError
from gradwire.codecs.dct_topk import cosines
from gradwire.core.grain import matrix_grain
from gradwire.ranks.supervised import run_function
from gradwire.sync.optimizers import DeMo, Dion, OneBitAdam, OrthonormalMomentum, SharedOptimizer, ZeroOneAdam
from gradwire.sync.optimizers.zero_one_adam import local_steps
from optimizer_cases import DEADLINE_S, LOSSY, STEPS, digest, give_gradients, model
from processors import PLAIN, WITHOUT_NUMBA

CASES = str(Path(__file__).with_name("optimizer_cases.py"))
PROCESSORS = [{}, PLAIN, WITHOUT_NUMBA]

PAGE = re.findall(
    r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("docs", "optimizers.md").read_text(), re.DOTALL
)

each = pytest.mark.parametrize("name", LOSSY)
each_size = pytest.mark.parametrize("ranks", [2, 3])


@functools.cache
def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    given = {name: list(value) for name, value in arguments.items()}
    return run_function(f"{CASES}:{case}", ranks, given, 120)


@functools.cache
def on_different_processors() -> list[Any]:
    return run_function(f"{CASES}:alike", 3, {}, 240, environments=PROCESSORS)


@each_size
@each
def test_all_ranks_have_the_same_parameters_bit_for_bit(name: str, ranks: int) -> None:
    found = [rank[name] for rank in run("alike", ranks)]
    assert len({each["digest"] for each in found}) == 1
    assert found[0]["digest"] != digest(model())


@pytest.mark.one_draw_in(3)
@each
def test_so_have_ranks_on_different_processors(name: str) -> None:
    assert len({rank[name]["digest"] for rank in on_different_processors()}) == 1


@each_size
@each
def test_without_loss_n_ranks_are_one_process_on_the_mean(name: str, ranks: int) -> None:
    assert all(rank[name] < 1e-4 for rank in run("by_mean", ranks))


@pytest.mark.one_draw_in(2)
@each_size
@each
def test_a_resume_is_bit_equal(name: str, ranks: int) -> None:
    for rank in run("resumed", ranks, breaks=(2, 7)):
        whole, *broken = rank[name]
        assert broken == [whole, whole]


@pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")
@each
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(name: str) -> None:
    found = [rank[name] for rank in run("not_finite", 3)]
    assert found == [[True, True, found[0][2], STEPS - 2]] * 3


@pytest.mark.one_draw_in(2)
@each_size
@each
def test_scalers_that_skip_on_one_rank_skip_on_all_and_a_resume_is_bit_equal(name: str, ranks: int) -> None:
    for whole, interrupted, plain, missed, skipped in (rank[name] for rank in run("under_scalers", ranks)):
        assert whole == interrupted == plain
        assert missed == skipped > 0


def test_a_scaler_that_found_infinities_skips_though_the_loop_has_repaired_them() -> None:
    assert run("unscaled_by_the_loop", 2) == [[True, 0]] * 2


def test_what_raises_before_a_step_is_told_to_the_others() -> None:
    *others, last = run("told", 3)
    assert last[0].startswith("StepError: the gradient of 'weight' is torch.sparse_coo")
    assert all(said.startswith("CommunicationError: rank 2 failed with StepError: the grad") for said, _ in others)
    assert all(seconds < DEADLINE_S / 4 for _, seconds in others)


def test_bytes_are_counted() -> None:
    found = run("alike", 2)[0]
    assert {name: each["steps"] for name, each in found.items()} == dict.fromkeys(LOSSY, STEPS) | {"zero_one_adam": 7}
    dense = found["one_bit_adam"]["ratio"] * found["one_bit_adam"]["bytes"]
    assert found["one_bit_adam"]["bytes"] < dense * (3 / STEPS + 0.1)
    zero_one = found["zero_one_adam"]  # four refreshes, two exchanges and the last one in 9 steps
    dense = zero_one["ratio"] * zero_one["bytes"]
    assert zero_one["bytes"] < dense * (4 / 7 + 0.1)
    assert found["demo"]["ratio"] > 4
    assert 1.5 < found["dion"]["ratio"] < found["dion_orthonormal"]["ratio"] * 3


@each
def test_another_number_of_ranks_goes_on_with_what_was_owed(name: str) -> None:
    for rank in run("resharded", 2):
        difference, largest = rank[name]
        assert difference <= 1e-6
        assert largest > 0 or name == "dion_orthonormal"  # which leaves this weight to Adam


@each
def test_they_compose_with_slow_averaging(name: str) -> None:
    assert run("with_slow_averaging", 2)[0][name] == [step % 4 == 3 for step in range(STEPS)]


def test_0_1_adam_has_no_local_steps_where_its_page_says() -> None:
    """With the defaults, from the freeze on."""
    freeze, scaler, clipper = (
        inspect.signature(ZeroOneAdam).parameters[name].default
        for name in ("var_freeze_step", "local_step_scaler", "local_step_clipper")
    )
    lengths = [local_steps(step, freeze, scaler, clipper) for step in range(freeze - 2, freeze + 5 * scaler)]
    first = next(i for i, length in enumerate(lengths) if length > 1) + freeze - 2
    page = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text()
    assert f"With the defaults ({freeze:,} and {scaler:,}) there are no local steps before step {first:,}" in page
    assert f"before step {first:,}" in (ZeroOneAdam.__doc__ or "")
    assert [length for length, _ in itertools.groupby(lengths)] == [1, 2, 4, 8, 16]


@each_size
def test_0_1_adam_is_its_algorithm(ranks: int) -> None:
    """Without loss, next to the paper's lines computed for all ranks in 64 bits."""
    for found in run("zero_one_by_hand", ranks):
        assert found["far"] < 1e-5
        assert found["alike"]
        assert found["steps"] == [4, 11]
        assert found["bytes"] == pytest.approx(11)  # of 16 steps


def test_a_rank_that_does_not_come_is_named() -> None:
    *others, last = run("absent", 3)
    assert last == "nothing"
    assert all("rank 2" in told for told in others)


# One rank, in this process ----------------------------------------------------------------------------------------


pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.one_of("ranks")]


def made(name: str, network: nn.Module, **more: Any) -> SharedOptimizer:
    return LOSSY[name](network, deadline_s=DEADLINE_S, **more)


@pytest.mark.parametrize("block", PAGE, ids=["loop", "slow"])
def test_examples_of_the_page_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, {})
    assert capsys.readouterr().out in ("", "0 bytes sent by this rank\n")


ADAMS = {
    "one_bit": functools.partial(OneBitAdam, freeze_step=100),
    "zero_one": functools.partial(ZeroOneAdam, var_update_scaler=100),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ADAMS)
def test_they_are_adam_while_the_variance_is_refreshed_in_every_step(name: str, weight_decay: float) -> None:
    ours, theirs = model(), model()
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    groups = [list(network.named_parameters()) for network in (ours, theirs)]
    first, second = ([{"params": g[:2], "lr": 1e-2}, {"params": g[2:], "betas": (0.8, 0.95)}] for g in groups)
    optimizer = ADAMS[name](first, 1e-3, weight_decay=weight_decay, deadline_s=DEADLINE_S)
    reference = kind(second, 1e-3, weight_decay=weight_decay)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 60) for o in (optimizer, reference)]
    for step in range(50):
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        theirs(inputs).square().mean().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad  # of its own it would have others, and Adam divides what is near zero by what is near zero
        for each, schedule in zip((optimizer, reference), schedules, strict=True):
            each.step()
            schedule.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert list(optimizer.session.names) == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    optimizer.close()


def test_after_its_freeze_only_momentum_changes() -> None:
    network = model()
    optimizer = OneBitAdam(network, freeze_step=2, deadline_s=DEADLINE_S)
    variances: list[Tensor] = []
    for step in range(4):
        assert optimizer.is_frozen == (step >= 2)
        give_gradients(network, step, 0)
        optimizer.step()
        variances.append(optimizer.state[network.get_parameter("0.weight")]["exp_avg_sq"].clone())
    assert not torch.equal(variances[0], variances[1])
    assert torch.equal(variances[1], variances[2])
    assert torch.equal(variances[2], variances[3])
    assert optimizer.param_groups[0]["variance_step"] == 2
    assert optimizer.session.residual_norm() > 0
    optimizer.close()


def test_what_never_had_a_gradient_stays_after_the_freeze() -> None:
    weight = nn.Parameter(torch.ones(16))
    optimizer = OneBitAdam([weight], freeze_step=2, deadline_s=DEADLINE_S)
    for _ in range(6):
        weight.grad = torch.tensor([1.0] * 8 + [0.0] * 8)
        optimizer.step()
    assert torch.equal(weight[8:], torch.ones(8))
    assert bool((weight[:8] < 1).all())
    optimizer.close()


def test_a_step_alone_is_skipped_alone_and_a_momentum_without_rates_is_forgotten() -> None:
    weight = nn.Parameter(torch.zeros(8))
    optimizer = ZeroOneAdam(
        [weight], var_freeze_step=1, local_step_scaler=1, local_step_clipper=2, method="none", deadline_s=DEADLINE_S
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moved: list[bool] = []
    for step in range(5):  # a refresh, an exchange, one alone, an exchange, one alone
        weight.grad = scaler.scale(torch.full((8,), torch.inf if step == 2 else 1.0))
        before = weight.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0 if step == 1 else 0.1
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, weight))
        if step == 1:
            assert not optimizer.state[weight]["exp_avg"].any()
    assert moved == [True, False, False, True, True]
    assert optimizer.param_groups[0]["step"] == 5
    assert optimizer.param_groups[0]["since"] == 1
    optimizer.sync()
    optimizer.sync()
    assert optimizer.param_groups[0]["since"] == 0
    assert optimizer.stats().steps == 4
    optimizer.close()


@pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")
def test_a_freeze_without_a_variance_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = OneBitAdam([weight], freeze_step=1, deadline_s=DEADLINE_S)
    weight.grad = torch.full((4,), float("nan"))
    optimizer.step()
    with pytest.raises(StepError, match="there is no variance: begin anew"):
        optimizer.step()
    optimizer.close()


def test_demo_is_its_algorithm() -> None:
    weight, basis = nn.Parameter(torch.zeros(64)), cosines(16, torch.device("cpu")).double()
    optimizer = DeMo([weight], 0.5, momentum=0.9, density=1 / 8, chunk=16, values="fp32", deadline_s=DEADLINE_S)
    momentum, expected = torch.zeros(4, 16, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        gradient = torch.randn(64, generator=generator)
        momentum = 0.9 * momentum + gradient.view(4, 16)
        coefficients = momentum @ basis.T
        largest = coefficients.abs().topk(2).indices
        fast = torch.zeros_like(coefficients).scatter(1, largest, coefficients.gather(1, largest)) @ basis
        momentum -= fast
        expected -= 0.5 * fast.view(-1).sign()
        weight.grad = gradient
        optimizer.step()
    assert torch.equal(weight.detach().double(), expected)
    assert optimizer.session.residual_norm() == pytest.approx(float(momentum.norm()), rel=1e-4)
    optimizer.close()


@pytest.mark.parametrize("right", ["normalised", "orthonormal"])
@pytest.mark.parametrize("rank", [3, 10, 12, 99])
def test_dion_is_its_algorithm(right: Any, rank: int) -> None:
    """The factors' signs and order are free, their product is not; so the reference uses LAPACK's QR.

    With `every_matrix` up to the full rank, 12, which stands for all larger ones, as in the authors' code.
    """
    rows, columns, momentum = 24, 12, 0.9
    weight = nn.Parameter(torch.zeros(rows, columns))
    every = rank > 3
    optimizer = Dion([("w", weight)], 0.1, momentum, rank=rank, right=right, every_matrix=every, deadline_s=DEADLINE_S)
    (_, state), *_ = optimizer.session.engine.states()
    right_factor = state.tensor("Qt")[0].double().T
    kept, moved = torch.zeros(2, rows, columns, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        gradient = torch.randn(rows, columns, generator=generator)
        B = kept + gradient
        P = torch.linalg.qr(B @ right_factor).Q
        R = B.T @ P
        kept = B - (1 - momentum) * P @ R.T
        right_factor = R / R.norm(dim=0)
        moved -= 0.1 * (rows / columns) ** 0.5 * (P @ (oriented_qr(R) if right == "orthonormal" else right_factor).T)
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), moved, rtol=0, atol=1e-4)
    assert float(moved.abs().max()) > 0.1
    optimizer.close()


def oriented_qr(R: Tensor) -> Tensor:
    """Orthonormal columns that lean to those of R, as Gram and Schmidt's do."""
    Q, triangle = torch.linalg.qr(R)
    return Q * triangle.diagonal().sign()


def test_orthonormal_right_factors_have_singular_values_of_one() -> None:
    found: dict[str, Tensor] = {}
    for right in ("normalised", "orthonormal"):
        ranks = Lockstep(OrthonormalMomentum(4, right=right), matrix_grain(20, 20), world_size=2)
        generator = torch.Generator().manual_seed(0)
        (result, _) = ranks.step([torch.randn(1, 20, 20, generator=generator) for _ in range(2)])
        found[right] = torch.linalg.svdvals(result[0].double())[:4]
    torch.testing.assert_close(found["orthonormal"], torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    assert float(found["normalised"].max()) > 1.1


def test_dion_leaves_to_adam_what_is_small_or_named() -> None:
    network = model()
    optimizer = Dion(network, rank=4, adam=("2.*",), deadline_s=DEADLINE_S)
    assert by_adam(optimizer) == ["0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    optimizer.close()


@pytest.mark.parametrize("every_matrix", [False, True])
def test_dion_leaves_to_adam_what_its_text_says(every_matrix: bool) -> None:
    """Matrices whose two factors are no smaller than themselves, or with `every_matrix` none."""
    shapes = [(rows, columns) for rows in (2, 7, 8, 9, 100) for columns in (1, 3, 8, 9, 64)]
    parameters = [(f"{shape}", nn.Parameter(torch.zeros(shape))) for shape in shapes]
    parameters += [("vector", nn.Parameter(torch.zeros(100))), ("named", nn.Parameter(torch.zeros(100, 100)))]
    optimizer = Dion(parameters, rank=4, every_matrix=every_matrix, adam=("named",), deadline_s=DEADLINE_S)
    wide = [f"{(m, n)}" for m, n in shapes if m * n <= 4 * (m + n)]
    assert 0 < len(wide) < len(shapes)
    assert by_adam(optimizer) == [*([] if every_matrix else wide), "vector", "named"]
    optimizer.close()


def test_the_reducer_of_dion_is_called_what_saves_of_before_call_it() -> None:
    optimizer = Dion(model(), rank=4, deadline_s=DEADLINE_S)
    assert "default=OrthonormalMomentum(rank=4, momentum=0.95, right='normalised'))" in optimizer.kind
    optimizer.close()


def by_adam(optimizer: Dion) -> list[str]:
    return [name for name, parameter, _ in optimizer.entries() if optimizer.state[parameter]]


def test_a_layer_without_gradients_gets_through_when_they_come_back() -> None:
    weight = nn.Parameter(torch.zeros(20, 20))
    optimizer = Dion([weight], 0.1, 0.0, rank=2, deadline_s=DEADLINE_S)
    for gradient in (torch.zeros(20, 20), torch.eye(20)):
        weight.grad = gradient
        optimizer.step()
        assert bool(weight.isfinite().all())
    assert bool(weight.any())
    optimizer.close()


@each
def test_closures_schedulers_and_zero_grad_work(name: str) -> None:
    network = model()
    optimizer = made(name, network)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (network(torch.ones(4, 40)) - 1).square().mean()
        loss.backward()
        return loss.item()

    first, start = optimizer.step(closure), digest(network)
    schedule.step()
    assert optimizer.step(closure) < first
    assert digest(network) == start
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in network.parameters())
    optimizer.close()


@each
def test_gradients_are_left_as_they_are(name: str) -> None:
    network = model()
    optimizer = made(name, network)
    for step in range(5):
        give_gradients(network, step, 0)
        before = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
        optimizer.step()
        after = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    optimizer.close()


@each
def test_a_run_that_is_saved_by_gradwire_save_goes_on(name: str, tmp_path: Path) -> None:
    network = model()
    optimizer = made(name, network)
    give_gradients(network, 0, 0)
    optimizer.step()
    gradwire.save(tmp_path, optimizer)
    state, norm = optimizer.state_dict(), optimizer.session.residual_norm()
    optimizer.close()
    again = made(name, network)
    assert gradwire.load(tmp_path, again) == 1
    assert again.session.residual_norm() == norm
    assert again.param_groups[0]["step"] == 1
    for number, its in state["state"].items():
        mine = again.state_dict()["state"][number]
        assert all(torch.equal(mine[key], value) for key, value in its.items())
    again.close()


def test_a_save_of_something_else_is_refused(tmp_path: Path) -> None:
    network = model()
    optimizer = made("demo", network)
    gradwire.save(tmp_path, optimizer)
    optimizer.close()
    with gradwire.Session(network, "none") as session:
        with pytest.raises(StateError, match="the saved state has reducer"):
            gradwire.load(tmp_path, session)
        gradwire.save(tmp_path, session, overwrite=True)
    other = made("demo", network)
    with pytest.raises(StateError, match="make it as it was"):
        gradwire.load(tmp_path, other)
    other.close()


def test_steps_alone_are_not_for_another_number_of_ranks() -> None:
    network = model()
    optimizer = made("zero_one_adam", network)
    states: list[Any] = []
    for step in range(9):
        give_gradients(network, step, 0)
        optimizer.step()
        states.append(optimizer.state_dict())
    with pytest.raises(StateError, match=r"call sync\(\) before gradwire\.save"):
        optimizer.resharded([states[7], states[7]])
    assert optimizer.resharded([states[8]])["param_groups"][0]["step"] == 9
    with pytest.raises(StateError, match=r"gradwire\.load brings them to another number"):
        gradwire.reshard([{**states[8]["communication"], "tree": None}], 2)
    optimizer.close()


def test_states_of_others_are_refused_and_change_nothing() -> None:
    network = model()
    optimizer = made("one_bit_adam", network)
    give_gradients(network, 0, 0)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(StateError, match="it is not that of a OneBitAdam"):
        optimizer.load_state_dict(torch.optim.Adam(network.parameters()).state_dict())
    other = made("demo", network)
    with pytest.raises(StateError, match="the saved state has reducer"):
        optimizer.load_state_dict({**before, "communication": other.state_dict()["communication"]})
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.close()
    other.close()


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(AttachError, match=r"parameter '0' is torch\.float64: train in float32"):
        DeMo([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    with pytest.raises(ValueError, match="freeze_step 0 is below 1"):
        OneBitAdam(model(), freeze_step=0)
    with pytest.raises(ValueError, match="local_step_clipper 0 is below 1"):
        ZeroOneAdam(model(), local_step_clipper=0)
    with pytest.raises(ValueError, match="betas"):
        OneBitAdam(model(), betas=(1.0, 0.9), freeze_step=1)
    with pytest.raises(ValueError, match="lr -1 is negative"):
        DeMo(model(), -1)
    with pytest.raises(gradwire.CompositionError, match="momentum"):
        Dion(model(), momentum=1.0, rank=2)
    with pytest.raises(gradwire.CompositionError, match="neither 'normalised' nor"):
        OrthonormalMomentum(2, right="left")  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match=r"no trained parameter has a name like 'head\.\*'"):
        Dion(model(), rank=2, adam=("head.*",), deadline_s=DEADLINE_S).close()


def test_a_step_that_cannot_be_done_is_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = DeMo(embedding, deadline_s=DEADLINE_S)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StepError, match=r"the gradient of 'weight' is torch\.sparse_coo"):
        optimizer.step()
    with pytest.raises(StepError, match="make a new optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.close()
    embedding.weight.grad = None
    with pytest.raises(StepError, match="closed"):
        optimizer.step()


def test_what_was_skipped_is_warned_about_once() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = DeMo([weight], deadline_s=DEADLINE_S)
    weight.grad = torch.full((4,), float("nan"))
    with pytest.warns(NonFiniteWarning):
        optimizer.step()
    assert optimizer.stats().bad_steps == 1
    assert optimizer.param_groups[0]["step"] == 0
    optimizer.step()
    optimizer.close()
