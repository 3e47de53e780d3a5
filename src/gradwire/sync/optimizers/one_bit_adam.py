"""1-bit Adam: Adam for a while, then momentum in one bit over a variance that no longer changes."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.errors import StepError
from gradwire.reducers.base import Reducer
from gradwire.reducers.compression_warm_up import CompressionWarmUp
from gradwire.reducers.exchange import PLAIN
from gradwire.spec import as_method
from gradwire.sync.optimizers.arithmetic import (
    adam_state,
    adam_step_,
    adam_update_,
    check_adam,
    check_rate,
    mix_,
    still_,
)
from gradwire.sync.optimizers.base import NamedParameter, Params, SessionOptions, SharedOptimizer


class OneBitAdam(SharedOptimizer):
    """Adam whose momentum travels in one bit once its variance is frozen (Tang et al. 2021, Algorithm 1).

    For the first T = `freeze_step` steps, with g the mean of the ranks' gradients g_i:

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2

    From then on v stays, no gradient travels, and every rank adds its own gradient to the momentum that all share:

        m = mean_i C(beta1 m + (1 - beta1) g_i),   x -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^T)) + eps)

    C is `method` with its error feedback. By default it is a sign and a scale for each block of 4096, in two shots:
    what a rank did not send it owes, and what the owner of a shard lost when it encoded the mean, the owner owes. These
    are the worker's and the server's error of the paper.

    Before the freeze it is PyTorch's `AdamW`, to rounding (`Adam`, without weight decay).

    Where it deviates: where the frozen variance is zero, as of a row of an embedding that never occurred, nothing
    moves: a sign has no zero, and Adam would divide the noise by eps. The authors have the user give a mask instead.
    The paper's Adam has no bias correction, and here it goes on after the freeze as it was before.

    How long to warm up: until the variance has settled. A variance frozen while
    the learning rate still rises, or while gradients still change in size, does not suit what follows.

    Args:
        params: a model, or parameters, named parameters or groups; float32.
        lr: learning rate.
        betas: of the momentum and of the variance.
        eps: added to the square root.
        weight_decay: decoupled, as in `AdamW`.
        freeze_step: T, at least 1; steps that are skipped count too, on every rank alike.
        method: C, a reducer or a spec. With `"none"` the momentum travels as it is.
        options: `group`, `seed`, `deadline_s`, `grain_numel`, `checksum`, `lane` of `gradwire.Session`.

    Raises:
        ValueError: options out of range.
        AttachError, SpecError, CompositionError: as `gradwire.Session`.

    References:
        Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
        ICML, Algorithm 1.

    Example:
        optimizer = OneBitAdam(model, lr=1e-3, freeze_step=1000)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
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
        freeze_step: int,
        method: Reducer | str = "sign",
        **options: Unpack[SessionOptions],
    ) -> None:
        check_rate(lr, weight_decay)
        check_adam(betas, eps)
        if freeze_step < 1:
            raise ValueError(f"freeze_step {freeze_step} is below 1: the variance needs at least one step")
        self.freeze_step = freeze_step
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0, "variance_step": 0}
        carrier = CompressionWarmUp(PLAIN, as_method(method), freeze_step)
        super().__init__(params, defaults, carrier, **options)

    _was_frozen = False

    @property
    def is_frozen(self) -> bool:
        """Whether the next step's message is the momentum."""
        return self.session.engine.index >= self.freeze_step

    def fresh(self, entry: NamedParameter) -> dict[str, Tensor]:
        """Momentum and variance of zeros."""
        return adam_state(entry.parameter)

    def make_step(self) -> None:
        """One step; its phase is asked before the session counts it.

        Raises:
            StepError: the variance is frozen, and every step before was skipped.
        """
        self._was_frozen = self.is_frozen
        if self._was_frozen and not self.param_groups[0]["variance_step"]:
            raise StepError("no gradient before freeze_step was finite, so there is no variance: begin anew")
        super().make_step()

    def count(self) -> None:
        """Count a step that is kept, and the variance's where it changes."""
        super().count()
        for group in self.param_groups:
            group["variance_step"] += not self._was_frozen

    def message(self, entry: NamedParameter, gradient: Tensor) -> Tensor:
        """The gradient, and after the freeze the momentum with this rank's gradient in it."""
        if not self._was_frozen:
            return super().message(entry, gradient)
        momentum = buffers.copied(self.state[entry.parameter]["exp_avg"])
        mix_(momentum, gradient, entry.group["betas"][0])
        return momentum

    @override
    def update(self, entry: NamedParameter, result: Tensor) -> None:
        _, parameter, group = entry
        state, count = self.state[parameter], group["variance_step"]
        if self._was_frozen:
            momentum, square = state["exp_avg"], state["exp_avg_sq"]
            momentum.copy_(still_(result, square))
            adam_step_(parameter, momentum, square, group, count)
        else:
            adam_update_(parameter, state, result, group, count)
