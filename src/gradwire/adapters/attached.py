"""Which session combines the gradients of a model. Neither keeps the other alive."""

from __future__ import annotations

import weakref
from typing import TypeVar

from torch import nn

from gradwire.session import Session

M = TypeVar("M", bound=nn.Module)

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def bind(session: Session, model: M) -> weakref.ref[M]:
    """Note that a session combines the gradients of a model, and return a weak reference to the model."""
    _SESSIONS[model] = weakref.ref(session)
    held = session.held_model = weakref.ref(model)
    return held


def session_of(model: nn.Module) -> Session | None:
    """Return the open session that combines the gradients of a model, if one does."""
    held = _SESSIONS.get(model)
    session = None if held is None else held()
    return session if session is not None and session.is_open else None
