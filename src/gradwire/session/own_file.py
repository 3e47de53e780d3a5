"""States that each rank has one of are not for a checkpoint that keeps one of each name."""

from __future__ import annotations

from types import FrameType

from gradwire.core.errors import StateError

_CHECKPOINTER = "torch.distributed.checkpoint"


def require_own_file(caller: FrameType) -> None:
    """Refuse to give a state to `torch.distributed.checkpoint`, which asks whatever has a `state_dict` for it.

    It keeps one of each name, since it takes what is no `DTensor` for alike on all ranks. A load would fail on every
    rank but one, when it is too late.

    Args:
        caller: who asks.

    Raises:
        StateError: it is the checkpointer, with what to do.
    """
    if str(caller.f_globals.get("__name__", "")).startswith(_CHECKPOINTER):
        raise StateError(
            f"{_CHECKPOINTER} would keep the state of one rank for all of them: pass session.stateful() of a model of "
            "fully_shard, and call gradwire.save for others"
        )
