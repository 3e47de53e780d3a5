"""What a written configuration is made of: settings, each with its reason and its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One setting of a framework.

    Attributes:
        name: as the framework writes it: `zero_optimization.stage`, `--bf16`.
        value: what it is set to; None for a flag that has no value.
        why: the reason.
        source: the document that says so.

    >>> print(Setting("--bf16", None, "needs no loss scaler", "https://a"))
    --bf16: needs no loss scaler [https://a]
    """

    name: str
    value: bool | int | float | str | None
    why: str
    source: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_written(self.value)}"
        return f"{self.name}{shown}: {self.why} [{self.source}]"


@dataclass(frozen=True)
class ConfigFile:
    """A configuration that was written.

    Attributes:
        text: the whole file.
        settings: all that it sets, in order, with reasons.
        has_reasons: whether the reasons stand in the file too, which JSON has no place for.
    """

    text: str
    settings: tuple[Setting, ...]
    has_reasons: bool = True

    def __str__(self) -> str:
        return self.text


def _written(value: bool | float | str) -> str:
    """A value as JSON writes it.

    >>> _written(True), _written("cpu")
    ('true', 'cpu')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
