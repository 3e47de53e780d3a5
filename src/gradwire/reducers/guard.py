"""Non-finite gradients reach the optimizer on every rank, and never a residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.core import agreement
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer, Wrapper, as_reducer
from gradwire.reducers.scatter_reduce import Scatter
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class Guard(Wrapper):
    """Where x is not finite on any rank, or the mean is not, the mean is NaN on all and the step is not kept.

    A NaN that went through top-k or a vote might vanish on its way to a `GradScaler`, and an infinity would stay in
    a residual for ever. So the ranks agree on a flag (all grains' flags travel as one small collective at the end of
    the step), the mean of a flagged grain is filled with NaN, and the driver forgets the state of *every* grain
    of the step, since the optimizer will skip them all. Where the inner reducer `shows_non_finite`, the mean alone
    tells every rank the same, and nothing is sent to agree on it.

    >>> from gradwire.codecs import TopK
    >>> from gradwire.reducers import AllGatherExchange
    >>> Guard(AllGatherExchange(TopK(0.5))).inner
    AllGatherExchange(codec=TopK(density=0.5, values='fp32', indices='auto'))
    """

    inner: Reducer

    def __post_init__(self) -> None:
        as_reducer(self.inner)

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer."""
        return Guard(inner)

    def scattered(self) -> Reducer:
        """The same around the inner reducer's half; that half alone where nothing needs to be guarded.

        A reducer without memory has nothing to protect. If its codec also shows what is not finite, the owner of the
        shard sees it, as in sharded training without compression, so no flag is sent.
        """
        inner = self.inner.scattered()
        shows = isinstance(inner, Scatter) and inner.codec.shows_non_finite
        return inner if shows else self.around(inner)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program, and then one flag, where the mean alone does not tell."""
        if self.inner.shows_non_finite:
            reduced = yield from self.inner.reduce(grain, x, state, step)
            return _flagged(reduced, kernels.all_finite(reduced.value).logical_not())
        bad = kernels.all_finite(x).logical_not()
        reduced = yield from self.inner.reduce(grain, x, state, step)
        del state  # on a GPU its residuals may be copies of what lies on the host: not to be held until ranks agree
        # A finite gradient may still overflow on its way (fp16): the mean, alike on all ranks, shows it.
        bad = bad.logical_or(kernels.all_finite(reduced.value).logical_not())
        agreed = (yield agreement.Agree(bad)).view(())
        return _flagged(reduced, agreed)


def _flagged(reduced: Reduced, bad: Tensor) -> Reduced:
    """The same result, poisoned and flagged where `bad` or what was reduced says so."""
    if reduced.bad is not None:
        bad = bad.logical_or(reduced.bad)
    return reduced._replace(value=poison(reduced.value, bad), bad=bad)


def flagged_by_result(program: Program, scatters: bool) -> Program:
    """The same program, whose step is not kept where its result is not finite.

    For rules, which leave out what is not finite on few ranks, and may be left with nothing else.

    Args:
        program: whose result is alike on all ranks, or this rank's shard of one.
        scatters: whether it is a shard: then ranks agree on a flag, since each sees only its own.
    """
    reduced = yield from program
    bad = kernels.all_finite(reduced.value).logical_not()
    return _flagged(reduced, (yield agreement.Agree(bad)).view(()) if scatters else bad)


def poison(mean: Tensor, bad: Tensor) -> Tensor:
    """Fill `mean` with NaN where the 0-d flag `bad` is set, and return it."""
    if mean.device.type == "cpu":  # the flag can be looked at here without waiting for a device
        return mean.fill_(float("nan")) if bool(bad) else mean
    return mean.masked_fill_(bad, float("nan"))
