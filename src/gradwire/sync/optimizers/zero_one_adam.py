"""0/1 Adam: a variance that is refreshed ever more rarely, momentum in one bit, and later local steps in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import StateError
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.sync.optimizers.arithmetic import (
    adam_denominator,
    adam_state,
    adam_update_,
    check_adam,
    check_rate,
    decay_,
    mix_,
    power,
    still_,
)
from gradwire.sync.optimizers.base import NamedParameter, Params, SessionOptions, SharedOptimizer
from gradwire.sync.swap import swapped


def refreshes_variance(step: int, var_freeze_step: int, var_update_scaler: int) -> bool:
    """Whether the variance changes in a step, counted from 0.

    The first `var_update_scaler` refreshes come in every step, as many after them in every second one, then in every
    fourth one, and so on: k_(j+1) - k_j = 2^floor(j / var_update_scaler). From `var_freeze_step` on there is none.

    >>> [step for step in range(30) if refreshes_variance(step, 20, 3)]
    [0, 1, 2, 3, 5, 7, 9, 13, 17]
    """
    doublings = (step // var_update_scaler + 1).bit_length() - 1
    since = step - var_update_scaler * (2**doublings - 1)
    return step < var_freeze_step and since % 2**doublings == 0


def local_steps(step: int, var_freeze_step: int, local_step_scaler: int, local_step_clipper: int) -> int:
    """Steps from one exchange to the next, at a step counted from 0.

    It is 1 until `var_freeze_step` and for `local_step_scaler` steps more, then doubles, and again after every
    `local_step_scaler` steps, and is `local_step_clipper` at most.

    >>> [local_steps(step, 4, 3, 6) for step in range(16)]
    [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    """
    doublings = max(0, step - var_freeze_step) // local_step_scaler
    return min(local_step_clipper, 1 << min(doublings, local_step_clipper.bit_length()))


class ZeroOneAdam(SharedOptimizer):
    """0/1 Adam (Lu et al. 2022, Algorithm 1).

    With v the variance, D = sqrt(v) + eps and r the learning rate, each with Adam's bias correction, a rank i with the
    gradient g_i does one of three things:

        refresh the variance:   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2,   g = mean_i g_i,
                                x -= r m / D
        go on alone:            m_i = beta1 m_i + (1 - beta1) g_i,   u_i += r m_i,   x_i = a - u_i / D
        exchange:               u = mean_i C(u_i) with this step in u_i,   x = a - u / D,   m = u / sum of r,   u_i = 0

    where a is the x of the last exchange, alike on all ranks, and the sum is over the steps since. C is `method` with
    its error feedback, by default one bit an element in two shots, as in `OneBitAdam`.

    Until `var_freeze_step` the variance is refreshed in the steps of `refreshes_variance`, and every other step is an
    exchange. From then on the variance stays, and exchanges come every `local_steps` steps, where those in between send
    nothing. That is every step for the first `local_step_scaler` steps: with the defaults, which are DeepSpeed's, there
    are no local steps before step 132,678. Parameters are alike on all ranks after every step but those.

    Where it deviates from the paper: a refresh sends gradients alone and not the buffer too, since the momentum is
    known from them, and it comes before the step and not after it, as in Adam; bias is corrected; a is kept where
    others recompute it from x and u, which rounds differently on every rank; where v is zero nothing moves, as in
    `OneBitAdam`. So where every step is a refresh this is PyTorch's `AdamW`, to rounding. Where all r since the last
    exchange were 0, u / (sum of r) would be 0 / 0, and the momentum becomes 0.

    A gradient that is not finite on any rank skips an exchange or a refresh on all of them: the next step is one. In a
    step without communication it skips the step on its rank alone.

    Args:
        params: a model, or parameters, named parameters or groups; float32.
        lr: learning rate.
        betas: of the momentum and of the variance.
        eps: added to the square root.
        weight_decay: decoupled, as in `AdamW`.
        var_freeze_step: steps after which the variance stays, at least 1; usually when the learning rate has stopped
            rising.
        var_update_scaler: refreshes at one interval before it doubles (the paper's kappa).
        local_step_scaler: steps at one interval of exchanges before it doubles, of which the first is 1.
        local_step_clipper: the longest interval of exchanges in steps (the paper's H); 1 for no local steps.
        method: C, a reducer or a spec. With `"none"` buffers travel as they are.
        options: `group`, `seed`, `deadline_s`, `grain_numel`, `checksum`, `lane` of `gradwire.Session`.

    Attributes:
        dense: the session that carries gradients where the variance is refreshed.

    Raises:
        ValueError: options out of range.
        AttachError, SpecError, CompositionError: as `gradwire.Session`.

    References:
        Lu et al. 2022, "Maximizing communication efficiency for large-scale training via 0/1 Adam".

    Example:
        optimizer = ZeroOneAdam(model, lr=1e-3, var_freeze_step=1000, local_step_scaler=1000)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        optimizer.sync()  # all ranks have the same parameters now
        optimizer.close()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        method: Reducer | str = "sign",
        **options: Unpack[SessionOptions],
    ) -> None:
        check_rate(lr, weight_decay)
        check_adam(betas, eps)
        self.var_freeze_step = _at_least_one("var_freeze_step", var_freeze_step)
        self.var_update_scaler = _at_least_one("var_update_scaler", var_update_scaler)
        self.local_step_scaler = _at_least_one("local_step_scaler", local_step_scaler)
        self.local_step_clipper = _at_least_one("local_step_clipper", local_step_clipper)
        counts = {"step": 0, "variance_step": 0, "since": 0, "rate_sum": 0.0}
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **counts}, method, **options
        )
        shared: SessionOptions = {**options, "lane": self.session.lane}
        self.dense = Session(self.tensors(), "none", what=type(self).__name__, **shared)

    def fresh(self, entry: NamedParameter) -> dict[str, Tensor]:
        """Momentum and variance of zeros."""
        return adam_state(entry.parameter)

    # Steps -------------------------------------------------------------------------------------------------------

    @property
    def is_refresh(self) -> bool:
        """Whether the next step refreshes the variance."""
        return refreshes_variance(self._count("step"), self.var_freeze_step, self.var_update_scaler)

    @property
    def is_exchange(self) -> bool:
        """Whether the next step exchanges buffers, where it is no refresh."""
        step = self._count("step")
        length = local_steps(step, self.var_freeze_step, self.local_step_scaler, self.local_step_clipper)
        return self._count("since") + 1 >= length

    def _count(self, key: str) -> int:
        return self.param_groups[0][key]

    def make_step(self) -> None:
        """One step: a refresh, an exchange, or one alone."""
        if self.is_refresh:
            self.combine(self.dense)
            return
        gradients = {entry.name: self.gradient(entry) for entry in self.entries()}
        if self.is_exchange:
            self._exchange(gradients)
        else:
            self._go_on_alone(gradients)

    @override
    def count(self) -> None:
        super().count()
        for group in self.param_groups:
            group["variance_step"] += 1

    def update(self, entry: NamedParameter, result: Tensor) -> None:
        """Adam's step with the mean gradient."""
        _, parameter, group = entry
        adam_update_(parameter, self.state[parameter], result, group, group["variance_step"])

    def _exchange(self, gradients: Mapping[str, Tensor]) -> None:
        buffers = {entry.name: self._with_this(entry, gradients[entry.name])[1] for entry in self.entries()}
        if self.exchanged(self.session, buffers):
            self._count_local()
            self._settle(buffers)

    def _go_on_alone(self, gradients: Mapping[str, Tensor]) -> None:
        is_finite = all(bool(kernels.all_finite(gradient)) for gradient in gradients.values())
        for entry in self.entries():
            state = self.state[entry.parameter]
            if "anchor" not in state:
                state["anchor"] = buffers.copied(entry.parameter.detach())
                state["buffer"] = buffers.like(entry.parameter).zero_()
            if is_finite:
                state["exp_avg"], state["buffer"] = self._with_this(entry, gradients[entry.name])
        self._count_local()
        for entry in self.entries():
            self._move(entry, self.state[entry.parameter]["buffer"])

    def _with_this(self, entry: NamedParameter, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Momentum and buffer with this step in them; what is remembered stays as it is."""
        state = self.state[entry.parameter]
        momentum = buffers.copied(state["exp_avg"])
        mix_(momentum, gradient, entry.group["betas"][0])
        buffer = buffers.times(momentum, _rate(entry.group, entry.group["step"] + 1))
        return momentum, buffer.add_(state["buffer"]) if "buffer" in state else buffer

    def _count_local(self) -> None:
        """Count a step that is no refresh, in which what the next exchange starts from decays."""
        super().count()
        for group in self.param_groups:
            group["since"] += 1
            group["rate_sum"] += _rate(group, group["step"])
        for _, parameter, group in self.entries():
            decay_(self.state[parameter].get("anchor", parameter), group)

    def _move(self, entry: NamedParameter, buffer: Tensor) -> None:
        """x = a - u / D; where the variance is zero nothing moves."""
        _, parameter, group = entry
        state = self.state[parameter]
        square = state["exp_avg_sq"]
        denominator = adam_denominator(square, group["betas"][1], group["variance_step"], group["eps"])
        moved = torch.div(still_(buffer, square), denominator, out=denominator)
        torch.sub(state.get("anchor", parameter), moved, out=parameter)

    def _settle(self, buffers: Mapping[str, Tensor]) -> None:
        """Go on from what all ranks received. Where all rates were zero the momentum is forgotten."""
        for entry in self.entries():
            state, received, rates = self.state[entry.parameter], buffers[entry.name], entry.group["rate_sum"]
            self._move(entry, received)
            state["exp_avg"].copy_(received.mul_(1.0 / rates if rates else 0.0))
            state.pop("anchor", None)
            state.pop("buffer", None)
        for group in self.param_groups:
            group["since"], group["rate_sum"] = 0, 0.0

    @torch.no_grad()
    def sync(self) -> None:
        """Exchange now what ranks have done alone: afterwards all have the same parameters.

        Every rank calls it at the same place, as after the last step. After a step that communicated it does nothing.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        if self._count("since"):
            with self.telling():
                buffers = {entry.name: self.state[entry.parameter]["buffer"].clone() for entry in self.entries()}
                if self.exchanged(self.session, buffers):
                    self._settle(buffers)

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block parameters are those of the last exchange, alike on all ranks; afterwards one's own."""
        anchors = {name: self.state[p].get("anchor", p.detach().clone()) for name, p, _ in self.entries()}
        return swapped({name: parameter for name, parameter, _ in self.entries()}, anchors)

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's state from those of another number of ranks, saved after an exchange.

        Raises:
            StateError: ranks had parameters of their own.
        """
        if any(group["since"] for group in states[0]["param_groups"]):
            raise StateError(
                f"the {len(states)} ranks of the save had made steps alone, each with parameters of its own: call "
                "sync() before gradwire.save, or load with as many ranks"
            )
        return super().resharded(states)

    # Figures, ending ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return bytes and times of communication so far, in refreshes and exchanges; other steps are not counted."""
        return Stats.summed((self.session.stats(), self.dense.stats()))

    def close(self) -> None:
        """Stop communicating; call `sync` before."""
        self.dense.close()
        super().close()


def _rate(group: Mapping[str, Any], step: int) -> float:
    """The learning rate with the bias correction of the momentum after so many steps."""
    return float(group["lr"]) / (1.0 - power(group["betas"][0], step))


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} {value} is below 1: it counts steps")
    return value
