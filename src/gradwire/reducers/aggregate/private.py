"""Differential privacy: each worker's gradient is clipped, and noise hides that it was there."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs import Identity
from gradwire.core import agreement, buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.kernels import robust
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.scatter_reduce import ShardwiseScatterReduce
from gradwire.reducers.sent import SentAll
from gradwire.reducers.step import Program, Reduced, Step

_CHUNK = 1 << 16
"""Elements that noise is added to at once."""

_DRAWN = buffers.SMALLEST // 2
"""Bytes that are drawn from the system at once."""


class Clipped(Reducer):
    """A reducer of gradients that are clipped, and that noise is added to: no mean of what ranks gave, nor linear.

    Raises:
        CompositionError: a clip that is not positive, or negative noise.
    """

    clip: float
    noise: float

    conserves_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise CompositionError(f"dp with clip {self.clip}: it must be positive, about a gradient's usual norm")
        if not 0 <= self.noise < math.inf:
            raise CompositionError(f"dp with noise {self.noise}: it must be 0 or more; 1 is usual")

    @property
    def averages(self) -> bool:
        """False: gradients are clipped first."""
        return False

    @property
    def linear(self) -> bool:
        """False, for the same reason."""
        return False

    @property
    @override
    def repeatable(self) -> bool:
        return self.noise == 0

    @property
    @override
    def private(self) -> bool:
        return True


@dataclass(frozen=True)
class PrivateMean(Clipped):
    """mean = 1/n sum_i x_i min(1, clip / |x_i|) + N(0, (noise * clip / n)^2) (McMahan et al. 2018, Algorithm 1).

    Where it deviates: there users are drawn, with weights by their examples; here all ranks take part and count alike.
    n is the number of ranks, which is fixed while a run goes on. So a worker moves the mean by C / n at most (their
    Lemma 1, with the denominator q W = n), and `epsilon` is for runs that differ by one worker's gradients being there
    or being zeros. A server whose clients come and go has `mean_of`.

    |x_i| is the norm of rank i's whole gradient: each rank adds up the squares of its grains (`Total`, no bytes), so
    nothing is sent before the backward pass has ended. Each rank adds noise of deviation noise * clip / sqrt(n) to its
    own gradient, so that the sum's is noise * clip, and one all-reduce follows, in float32 at least. The noise comes
    from the system's entropy and never from a shared key, so no two runs are the same.

    What is private, and towards whom: a *worker's* whole contribution to a step, towards whoever sees the model. A rank
    knows its own noise, so towards it the noise counts (n - 1)/n of the variance; a rank that leaves its noise out
    takes that much away. `epsilon` says what it costs. Noise is drawn in float64 and rounded: an adversary that sees
    the bits of single results could exploit that (Mironov 2012).

    Under a `GradScaler`, `clip` is in the units of scaled gradients.

    Args:
        clip: C, the largest norm that a worker's gradient keeps.
        noise: sigma, the noise's deviation in units of C; 1 is usual, 0 means none and nothing private.

    Raises:
        CompositionError: a clip that is not positive, or negative noise.

    References:
        McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models".
    """

    clip: float
    noise: float = 1.0

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The norm, then one all-reduce."""
        n = step.world_size
        y = buffers.as_dtype(x.reshape(-1), torch.promote_types(x.dtype, torch.float32))
        square = yield agreement.Total(robust.products(y.view(1, -1)), of=self, over="grains")
        y = buffers.copied(y).mul_((_clipping(self.clip, square.view(())) / n).to(y.dtype))
        add_noise(y, self.noise * self.clip / math.sqrt(n) / n)
        total = yield collective.AllReduce(y, consumable=True)
        return Reduced(buffers.as_dtype(total, x.dtype).view(x.shape), SentAll(), state)

    @override
    def scattered(self) -> Reducer:
        return PrivateReports(ShardwiseScatterReduce(Identity()), self.clip, self.noise, together=True)

    def mean_of(self, rows: Tensor, expected: float) -> Tensor:
        """Return 1/expected sum_i x_i min(1, clip / |x_i|) + N(0, (noise * clip / expected)^2) of rows (n, numel).

        `expected` stands for q W in the estimator f_f of McMahan et al. 2018 (Lemma 1). It has to be fixed before
        anybody knows who sends something: a row more or less then moves the result by clip / expected at most. Divided
        by the n rows that came, it would move by twice as much. Without rows the result is the noise alone.

        Args:
            rows: what one holds who has them all, float32 or float64; there may be none.
            expected: how many rows were expected, above 0.

        Raises:
            CompositionError: an `expected` that is not above 0.

        >>> PrivateMean(1.0, noise=0.0).mean_of(torch.tensor([[3.0], [0.5]]), expected=4)
        tensor([0.3750])
        """
        if not 0 < expected < math.inf:
            raise CompositionError(f"a private mean of {expected} rows: say how many are expected, a number above 0")
        out = rows.new_zeros(rows.shape[1])
        if rows.shape[0]:
            squares = torch.stack([robust.products(row.view(1, -1)).view(()) for row in rows])
            robust.weighted_sum(rows, _clipping(self.clip, squares) / expected, out)
        add_noise(out, self.noise * self.clip / expected)
        return out


@dataclass(frozen=True)
class PrivateReports(Clipped, Wrapper):
    """Each rank clips its gradient and adds noise to it before anything leaves the rank; then any rule may follow.

        y_i = x_i min(1, clip / |x_i|) + N(0, (noise * clip)^2 I),    result = inner(y_1, ..., y_n)

    Each y_i is an output of the Gaussian mechanism (Dwork & Roth 2014, Theorem A.1, with the accounting of `epsilon`),
    and what is made of it afterwards costs no further privacy, since differential privacy is closed under
    post-processing (Proposition 2.1 there). So a median, Krum or a codec may follow. This is local privacy: it holds
    for rank i's whole contribution to a step, towards everybody who sees y_i, the other ranks included, whatever they
    do. It needs nobody's honesty but that of rank i. `epsilon(noise, steps, delta)` is for runs that differ by rank i's
    gradients being there or being zeros, `epsilon_of_replacing(noise, steps, delta)` for any two of its gradients.

    Its price: in a mean of n the noise has deviation noise * clip / sqrt(n), sqrt(n) times that of `PrivateMean` with
    the same epsilon, where one noise of deviation noise * clip hides all ranks at once. After a rule that is no mean
    such a central noise would hide nobody: one rank moves a median as far as the others lie apart, which no clip bounds
    by clip / n.

    What robustness becomes: a rule tolerates as many ranks as before, and its `reach` is in terms of the distances
    between good *reports*. Two of them are about noise * clip * sqrt(2 d) apart in d dimensions, however near their
    gradients are. A bad rank may leave out clipping and noise; that costs its own privacy only.

    |x_i| is that of the whole gradient, but under FSDP2, where parameter groups are reduced one by one, that of a
    group. A contribution of G groups is then at most clip * sqrt(G) long, so that `epsilon` is asked with
    noise / sqrt(G). Noise comes from the system's entropy, as in `PrivateMean`.

    Args:
        inner: what combines the reports.
        clip: C, the largest norm that a worker's gradient keeps.
        noise: sigma, the noise's deviation in units of C.
        together: the noise of all ranks together has that deviation, and each adds noise * clip / sqrt(n). For means
            that only their sum protects: `PrivateMean`, shard by shard.

    Raises:
        CompositionError: as `PrivateMean`.

    References:
        Dwork & Roth 2014, "The algorithmic foundations of differential privacy"; Kasiviswanathan, Lee, Nissim,
        Raskhodnikova & Smith 2011, "What can we learn privately?", for privacy that is local.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.reducers.aggregate import Median, Sharded
    >>> ranks = Lockstep(PrivateReports(Sharded(Median()), clip=1.0, noise=0.0), flat_grain(1), world_size=3)
    >>> ranks.step([torch.tensor([0.5]), torch.tensor([4.0]), torch.tensor([-900.0])])[0]
    tensor([0.5000])
    """

    inner: Reducer
    clip: float
    noise: float = 1.0
    together: bool = False

    @property
    def lossless(self) -> bool:
        """False: noise is added."""
        return False

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer."""
        return PrivateReports(inner, self.clip, self.noise, self.together)

    def contraction(self, grain: Grain) -> float | None:
        """None: what is sent is not near what was given."""
        return None

    def absolute_error(self, grain: Grain) -> float | None:
        """None, for the same reason."""
        return None

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The norm, then the inner program on the report."""
        y = buffers.as_dtype(x, torch.promote_types(x.dtype, torch.float32))
        square = yield agreement.Total(robust.products(y.reshape(1, -1)), of=self, over="grains")
        y = buffers.copied(y).mul_(_clipping(self.clip, square.view(())).to(y.dtype))
        add_noise(y, self.noise * self.clip / (math.sqrt(step.world_size) if self.together else 1.0))
        reduced = yield from self.inner.reduce(grain, y, state, step)
        return reduced._replace(value=buffers.as_dtype(reduced.value, x.dtype))


def _clipping(clip: float, square: Tensor) -> Tensor:
    """min(1, clip / |x|) from |x|^2."""
    return clip / square.sqrt().clamp(min=clip)


def add_noise(x: Tensor, deviation: float) -> None:
    """x += N(0, deviation^2), drawn from the system's entropy (`os.urandom`)."""
    if x.device.type == "meta" or not deviation:
        return
    flat = x.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        noise = buffers.as_dtype(system_normal(piece.numel()), piece.dtype)
        piece.add_(noise.to(piece.device), alpha=deviation)


def system_normal(numel: int) -> Tensor:
    """Return standard normal numbers in float64 (Box & Muller 1958) that nobody can draw again."""
    pairs = (numel + 1) // 2
    words = _system_words(2 * max(1, pairs)).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    u = buffers.copied(words, torch.float64).add_(0.5).mul_(2.0**-53).view(2, -1)[:, :pairs]
    radius, angle = u[0].log_().mul_(-2.0).sqrt_(), u[1].mul_(2 * math.pi)
    out = buffers.empty((2, pairs), torch.float64, u.device)
    torch.mul(torch.cos(angle, out=out[0]), radius, out=out[0])
    torch.mul(torch.sin(angle, out=out[1]), radius, out=out[1])
    return out.view(-1)[:numel]


def _system_words(count: int) -> Tensor:
    """Return 64-bit words of the system's entropy.

    They are asked for in pieces that malloc keeps: one piece of all of them would be fresh memory in every call.
    """
    words = buffers.empty((count,), torch.int64, torch.device("cpu"))
    for piece in words.view(torch.uint8).split(_DRAWN):
        piece.copy_(torch.frombuffer(bytearray(os.urandom(piece.numel())), dtype=torch.uint8))
    return words


def epsilon(noise: float, steps: int, delta: float, sampling: float = 1.0) -> float:
    """Return epsilon of `steps` private means: with it they are (epsilon, delta)-private for each worker.

    Neighbours are two sets of workers of which one has one worker more; what the other set lacks adds nothing to the
    sum, and the denominator is the same. Workers are drawn each by itself (Poisson sampling). By Renyi accounting
    (Mironov 2017; Mironov, Talwar & Zhang 2019, section 3.3) as Google's dp-accounting library does it.

    Args:
        noise: sigma of `PrivateMean`.
        steps: how many means were taken, those to which nobody added something included.
        delta: well below 1 / (number of workers there might be).
        sampling: q, the probability with which a worker takes part in a step; 1 where all always do, as under DDP.

    Raises:
        CompositionError: dp-accounting is not installed, or a number is out of range.

    References:
        Mironov, Talwar & Zhang 2019, "Renyi differential privacy of the sampled Gaussian mechanism".

    >>> epsilon(noise=0.0, steps=1, delta=1e-5)
    inf
    """
    if (known := _without_accounting(noise, steps, delta, sampling)) is not None:
        return known
    library, rdp = _accounting()
    event = library.PoissonSampledDpEvent(sampling, library.GaussianDpEvent(noise))
    return _composed(rdp.RdpAccountant(), event, steps, delta)


def epsilon_of_replacing(noise: float, steps: int, delta: float, sampling: float = 1.0) -> float:
    """Return epsilon of `steps` private means of n workers each, where one worker may be another one.

    Neighbours are two sets of W workers that differ in one of them. In each step n of the W are drawn at once, without
    replacement. Replacing a worker moves the mean by 2 clip / n, so the noise counts for half of what it counts in
    `epsilon`. It is the lesser of two bounds: Theorem 27 of Wang, Balle & Kasiviswanathan 2019, as Google's
    dp-accounting library has it, and what the means cost where all workers are in each of them. The first one is far
    from tight: with noise 1, delta 1e-5, 100 steps and a tenth of the workers in each it gives 83.9. For Poisson
    sampling `epsilon` gives 7.9.

    Args:
        noise: sigma of `PrivateMean`.
        steps: how many means were taken.
        delta: well below 1 / W.
        sampling: n / W. Give 1 where workers are chosen in any other way in which their data has no part: nothing is
            gained by sampling then, and `steps` is how many means that worker took part in who took part in most.

    Raises:
        CompositionError: as `epsilon`.

    References:
        Wang, Balle & Kasiviswanathan 2019, "Subsampled Renyi differential privacy and analytical moments accountant".

    >>> epsilon_of_replacing(noise=0.0, steps=1, delta=1e-5)
    inf
    """
    if (known := _without_accounting(noise, steps, delta, sampling)) is not None:
        return known
    library, rdp = _accounting()
    every = library.GaussianDpEvent(noise / 2)
    # The library takes nothing of the two sizes but their quotient.
    some = library.SampledWithoutReplacementDpEvent(1.0, sampling, every)
    relation = library.NeighboringRelation.REPLACE_ONE
    return min(
        _composed(rdp.RdpAccountant(neighboring_relation=relation), event, steps, delta) for event in (every, some)
    )


def _without_accounting(noise: float, steps: int, delta: float, sampling: float) -> float | None:
    """Epsilon where it needs no accountant, None elsewhere; refuses numbers that make no sense."""
    if noise < 0 or steps < 0 or not 0 < delta < 1 or not 0 < sampling <= 1:
        raise CompositionError(
            f"epsilon of noise={noise}, steps={steps}, delta={delta}, sampling={sampling}: noise and steps must not be "
            "negative, delta lies in (0, 1) and sampling in (0, 1]"
        )
    if steps == 0:
        return 0.0
    return math.inf if noise == 0 else None


def _composed(accountant: Any, event: Any, steps: int, delta: float) -> float:
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def _accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise CompositionError(
            "accounting for privacy needs Google's dp-accounting: pip install 'gradwire[private]'"
        ) from error
    return dp_accounting, rdp
