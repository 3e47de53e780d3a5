"""What advice for a cluster is made of: variables, each with its reason and the document that says so.

NCCL finds out by itself most of what can be set, and what is set keeps it from finding that. So the advice is short,
and a part of it is what to leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Advice:
    """A line of an environment file, or what is to be left out or done outside of it.

    Attributes:
        name: of the variable; empty for a remark.
        value: to set it to; None where it must not be set.
        why: the reason.
        source: the document.
        is_example: whether the value depends on the cluster, so that the line has to be looked at.
    """

    name: str
    value: str | None
    why: str
    source: str
    is_example: bool = False

    def lines(self) -> list[str]:
        """The lines of the file: the reason and the source as remarks, then the variable.

        >>> print(*Advice("NCCL_NET", "IB", "fail where it is missing", "https://a").lines(), sep="\\n")
        # fail where it is missing [https://a]
        export NCCL_NET=IB
        """
        remark = f"# {self.why} [{self.source}]"
        if not self.name:
            return [remark]
        if self.value is None:
            return [f"# leave {self.name} out: {self.why} [{self.source}]"]
        look = "  # an example: write what your hosts have" if self.is_example else ""
        return [remark, f"export {self.name}={_quoted(self.value)}{look}"]


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster.

    Attributes:
        name: as `--cluster` takes it.
        what: it is, in a few words.
        advice: in the order of the file.
        synonyms: what else it is called.
    """

    name: str
    what: str
    advice: tuple[Advice, ...]
    synonyms: tuple[str, ...] = field(default=())

    @property
    def variables(self) -> Mapping[str, str]:
        """What is to be set, by name."""
        return {each.name: each.value for each in self.advice if each.name and each.value is not None}

    def __str__(self) -> str:
        """An environment file for a shell: `source` it on every host before the launcher."""
        lines = [f"# NCCL on {self.what}. Every host needs the same, but for names of interfaces and devices."]
        return "\n".join([*lines, *(line for each in self.advice for line in ["", *each.lines()])])
