"""Dion: updates of low rank with orthonormal factors, for matrices; Adam for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from torch import Tensor

from gradwire.core.grain import ParameterSpec
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.guard import Guard
from gradwire.reducers.partition import Partition
from gradwire.sync.optimizers.arithmetic import adam_state, adam_update_, check_adam, check_rate, decay_
from gradwire.sync.optimizers.base import NamedParameter, Params, SessionOptions, SharedOptimizer
from gradwire.sync.optimizers.orthonormal import OrthonormalMomentum, OrthonormalMomentumOfAll


class Dion(SharedOptimizer):
    """Distributed orthonormalised updates (Ahn, Xu et al. 2025, Algorithm 1, for ranks with momenta of their own).

    A matrix X of shape (rows, columns) moves along the strongest `rank` directions of momentum B = M + G, by steps of
    one length in each of them. With Q of the last step:

        P = orth(mean_i B_i Q),   R = mean_i B_i^T P,   M_i = B_i - (1 - momentum) P R^T
        Q = R with columns of length 1,   X -= lr sqrt(rows / columns) P Q^T

    Only factors travel, (rows + columns) * rank floats; see `OrthonormalMomentum`, the reducer that does it. It keeps
    M_i and Q in the session. A parameter of more dimensions is the matrix of its first one by all others.

    Adam takes three kinds of parameters, with the mean of the ranks' gradients and at the rate `adam_share * lr`: those
    of one dimension; those with a name in `adam`; and matrices whose two factors are no smaller than themselves, where
    rows * columns <= rank * (rows + columns). So the third kind begins at half the full rank for a square matrix. Where
    it deviates: the authors know no third kind; they take min(rank, rows, columns) columns of every matrix, up to its
    full rank. `every_matrix=True` does the same, and then a matrix of small sides or of full rank sends up to twice its
    own size. The authors leave embeddings and output layers to Adam, which `adam` does by their names.

    Args:
        params: a model, or parameters, named parameters or groups; float32.
        lr: learning rate of matrices; since their updates have one length, much larger than Adam's.
        momentum: share of what a step has used that stays in the momentum, in [0, 1).
        weight_decay: decoupled: x *= 1 - lr * weight_decay before the step.
        rank: columns of the factors; the authors take a quarter to a sixteenth of the width.
        right: "normalised", or "orthonormal": Q is an orthonormal basis of what R spans, as in Orth-Dion (Nakamori et
            al. 2026). All else stays Dion's, which Orth-Dion's is not: see `OrthonormalMomentum`.
        every_matrix: whether matrices go to Adam whose factors are no smaller than themselves (False), or none (True).
        adam: globs on names of parameters that Adam takes, such as `("embed*", "head.*")`.
        adam_share: Adam's learning rate by `lr`.
        betas, eps: Adam's.
        options: `group`, `seed`, `deadline_s`, `grain_numel`, `checksum`, `lane` of `gradwire.Session`.

    Raises:
        ValueError: lr, weight_decay, betas, eps or adam_share out of range.
        CompositionError: rank, momentum or right out of range.
        AttachError: as `gradwire.Session`, which also warns of a glob that meets no name.

    References:
        Ahn, Xu et al. 2025, "Dion: distributed orthonormalized updates", arXiv:2504.05295;
        Nakamori et al. 2026, "Orth-Dion: eliminating geometric mismatch in distributed low-rank spectral optimization",
        arXiv:2605.16341, of which it has the orthonormal right factor alone.

    Example:
        optimizer = Dion(model, lr=0.01, rank=64, adam=("embed*",))
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        optimizer.close()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        rank: int,
        right: Literal["normalised", "orthonormal"] = "normalised",
        every_matrix: bool = False,
        adam: Sequence[str] = (),
        adam_share: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Unpack[SessionOptions],
    ) -> None:
        check_rate(lr, weight_decay)
        check_adam(betas, eps)
        if not adam_share >= 0:
            raise ValueError(f"adam_share {adam_share} is negative")
        dense = PLAIN
        orthonormal = (OrthonormalMomentumOfAll if every_matrix else OrthonormalMomentum)(rank, momentum, right)
        self._policy = Partition(tuple((glob, dense) for glob in adam), orthonormal)
        self._adam_share = adam_share
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0}
        super().__init__(params, defaults, Guard(self._policy), **options)

    def is_orthonormal(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter moves by orthonormal updates; else it is Adam's."""
        spec = ParameterSpec(name, tuple(parameter.shape), parameter.dtype, parameter.device)
        return isinstance(self._policy.assign(spec), OrthonormalMomentum)

    def fresh(self, entry: NamedParameter) -> dict[str, Tensor]:
        """Of what is Adam's, momentum and variance of zeros; the session keeps the momentum of matrices."""
        return {} if self.is_orthonormal(entry.name, entry.parameter) else adam_state(entry.parameter)

    def update(self, entry: NamedParameter, result: Tensor) -> None:
        """A step along the direction of a matrix, or Adam's."""
        _, parameter, group = entry
        state = self.state[parameter]
        if not state:
            decay_(parameter, group)
            parameter.sub_(result.mul_(float(group["lr"])))
            return
        adam_update_(parameter, state, result, group, group["step"], self._adam_share)
