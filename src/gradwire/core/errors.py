"""Errors: each says what is wrong and what to do about it."""

from __future__ import annotations


class GradwireError(Exception):
    """Base of every error gradwire raises on purpose."""


class SpecError(GradwireError, ValueError):
    """A method spec that cannot be read, or names something that does not exist."""


class CompositionError(GradwireError, ValueError):
    """Parts that do not fit together, found at construction and never at run time."""


class PayloadError(GradwireError, ValueError):
    """A payload that is damaged or was made by another codec."""


class AttachError(GradwireError, RuntimeError):
    """A model, optimizer or process group that gradwire cannot serve, with the reason."""


class StateError(GradwireError, ValueError):
    """A saved state that does not belong to this model or reducer."""


class CommunicationError(GradwireError, RuntimeError):
    """A rank failed or fell silent; the message names it where it is known."""


class NetworkError(GradwireError, RuntimeError):
    """The emulated network cannot be built here; the message says what is missing."""
