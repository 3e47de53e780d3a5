"""DeMo: momentum that ranks keep apart, of which only the fast components are exchanged."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor

from gradwire.codecs.dct_topk import DCTTopK
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.exchange import AllGatherExchange
from gradwire.reducers.guard import Guard
from gradwire.sync.optimizers.arithmetic import check_rate, decay_
from gradwire.sync.optimizers.base import NamedParameter, Params, SessionOptions, SharedOptimizer


class DeMo(SharedOptimizer):
    """Decoupled momentum (Peng, Quesnelle & Kingma 2024, Algorithm 1, with the sign of Signum as step).

    Every rank i has a momentum of its own. It takes out of it the largest coefficients of a cosine transform, chunk by
    chunk, and all ranks step by the sign of the mean of what was taken out:

        m_i = momentum * m_i + g_i,   q_i = top-k of DCT(m_i),   m_i = m_i - q_i,   x -= lr * sign(mean_i q_i)

    What is taken out is subtracted, so this is error feedback that forgets: m_i is the residual of
    `ErrorFeedback(AllGatherExchange(DCTTopK(density, chunk)), decay=momentum)`. The session keeps it.

    Where it deviates from the authors' code:

    - There a coefficient is averaged over the ranks that sent it, here over all ranks: one that few ranks sent weighs
      less in the sign of an element.
    - There the momentum adds up lr * g_i, here g_i. The steps are the same as long as lr is: a sign has no size. Where
      a schedule changes lr, theirs counts a gradient by the rate of its own step, and this one counts all alike.
    - There a matrix is cut into tiles of 64 x 64, transformed in both dimensions, and 32 coefficients of a tile are
      sent, 1/128 of them; of a vector 32 of 64. Here chunks of 64 run along the flat parameters, and 4 of each are
      sent, 1/16. `density=1/128` sends no less than one of a chunk, so take `chunk=128` with it.
    - Here coefficients travel in bfloat16 and indices in 6 bits; there both travel as they are in memory. Here all
      ranks decode in one fixed order, so that signs are the same on all of them.

    Every element moves by `lr` in every step, so rates are those of Signum or Lion: a third to a tenth of AdamW's.

    Args:
        params: a model, or parameters, named parameters or groups; float32.
        lr: learning rate.
        momentum: share of the momentum that stays from one step to the next, in (0, 1].
        weight_decay: decoupled: x *= 1 - lr * weight_decay before the step.
        density: share of the coefficients that is sent, in (0, 1].
        chunk: elements transformed together, a power of two from 8 to 256.
        values: "fp32" or "bf16", what coefficients travel in.
        options: `group`, `seed`, `deadline_s`, `grain_numel`, `checksum`, `lane` of `gradwire.Session`.

    Raises:
        ValueError: lr or weight_decay out of range.
        CompositionError: momentum, density, chunk or values out of range.
        AttachError: as `gradwire.Session`.

    References:
        Peng, Quesnelle & Kingma 2024, "DeMo: decoupled momentum optimization", arXiv:2411.19870.

    Example:
        optimizer = DeMo(model, lr=3e-4)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        optimizer.close()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-4,
        momentum: float = 0.999,
        weight_decay: float = 0.0,
        *,
        density: float = 1 / 16,
        chunk: int = 64,
        values: Literal["fp32", "bf16"] = "bf16",
        **options: Unpack[SessionOptions],
    ) -> None:
        check_rate(lr, weight_decay)
        carrier = Guard(ErrorFeedback(AllGatherExchange(DCTTopK(density, chunk, values)), decay=momentum))
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "step": 0}, carrier, **options)

    def fresh(self, entry: NamedParameter) -> dict[str, Tensor]:
        """Nothing: the session keeps the momentum."""
        return {}

    def update(self, entry: NamedParameter, result: Tensor) -> None:
        """A step by the sign."""
        decay_(entry.parameter, entry.group)
        entry.parameter.sub_(result.sign_().mul_(float(entry.group["lr"])))
