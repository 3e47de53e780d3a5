"""What `gradwire bench` refuses."""

from __future__ import annotations

from gradwire.core.errors import GradwireError


class BenchError(GradwireError, ValueError):
    """What cannot be measured as it was asked for; the message says what to ask for instead."""
