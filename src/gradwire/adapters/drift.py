"""Parameters of a `DistributedDataParallel` model that are compared between ranks every so many steps."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.uncompiled import before_passes
from gradwire.core.errors import AttachError
from gradwire.session import Session
from gradwire.session.drift import check_drift
from gradwire.session.watching import require_rhythm


def watch_drift(model: nn.Module, session: Session, check_every: int, on_drift: str = "warn") -> None:
    """Have `gradwire.check_drift` called before the first pass of every so many steps, on the model's parameters.

    Call it on every rank, after `attach`. In `ddp.join()`, where some ranks come no more, nothing is compared.

    Args:
        model: the `DistributedDataParallel` model, compiled or not.
        session: what `gradwire.attach` returned for it.
        check_every: steps between two comparisons. A comparison reads all parameters and takes a few words through
            the store.
        on_drift: "warn", "stop" or "repair", see `gradwire.check_drift`.

    Raises:
        AttachError: another kind of model, a number below 1, or another word.

    Example:
        gradwire.watch_drift(ddp, session, check_every=1000, on_drift="repair")
    """
    ddp = require_watchable(model, check_every, on_drift)
    steps, begins = 0, True

    def before() -> None:
        nonlocal steps, begins
        if not session.is_open:
            return
        if begins and steps and steps % check_every == 0:
            check_drift(session, ddp.module, on_drift)
        begins = ddp.require_backward_grad_sync  # else another pass belongs to the same step
        steps += begins

    before_passes(ddp, before)


def require_watchable(model: nn.Module, check_every: int, on_drift: str) -> DistributedDataParallel:
    """Return the `DistributedDataParallel` model whose parameters can be compared.

    Raises:
        AttachError: as `watch_drift`.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(f"watch_drift wants a DistributedDataParallel model, got {type(ddp).__name__}")
    require_rhythm(check_every, on_drift)
    return ddp
