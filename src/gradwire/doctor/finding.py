"""What an examination says: findings, what could not be checked, and both in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gradwire.core.figures import ranks_named
from gradwire.topology.link_matrix import LinkMatrix

Severity = Literal["error", "warning", "note"]
"""An error stops a training or makes it wrong, a warning makes it slow or fragile, a note is worth knowing."""

_WORST_FIRST: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, or that is worth knowing.

    Attributes:
        severity: "error", "warning" or "note".
        check: which check found it, such as "interfaces".
        what: is wrong, in a sentence.
        evidence: what was read or measured.
        remedy: what to do.
        source: a document that says so, as a name or an address; None where the evidence says it all.
        hosts: where it was found; empty where it is about all of them together.
        ranks: the same by ranks; empty without a launcher.

    >>> found = Finding("error", "ports", "the port is taken", "127.0.0.1:29500 is in use", "Set another MASTER_PORT.")
    >>> print(found.text())
    ERROR    the port is taken
             evidence: 127.0.0.1:29500 is in use
             remedy:   Set another MASTER_PORT.
    """

    severity: Severity
    check: str
    what: str
    evidence: str
    remedy: str
    source: str | None = None
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def text(self, world_size: int = 1) -> str:
        """A few lines for people.

        Args:
            world_size: of all ranks that were examined; where a finding is of all of them, none is named.
        """
        where = _where(self.hosts, self.ranks, world_size)
        lines = [f"{self.severity.upper():8} {where}{self.what}", f"evidence: {self.evidence}"]
        lines += [f"remedy:   {self.remedy}", *([f"source:   {self.source}"] if self.source else [])]
        return "\n         ".join(lines)


@dataclass(frozen=True)
class Unchecked:
    """A check that could not be made, and why.

    >>> Unchecked("devices", "NVML is not installed").text()
    'not checked: devices, since NVML is not installed'
    """

    check: str
    why: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def text(self, world_size: int = 1) -> str:
        """One line for people."""
        return f"not checked: {_where(self.hosts, self.ranks, world_size)}{self.check}, since {self.why}"


Outcome = Finding | Unchecked
"""What a check yields; a check that yields nothing has found nothing."""


@dataclass(frozen=True)
class Examination:
    """All that was found, the worst first.

    Attributes:
        findings: the worst first.
        unchecked: what could not be checked.
        subject: what was examined, in a line.
        ranks: how many were examined.
        matrix: latency and bandwidth of each pair; None where nothing was measured.
        seen: lines about the host, for people; empty where several were examined.
        have_met: whether all ranks have this; else it is what one of them knows, which has met no other.

    >>> clean = Examination.of([], subject="host a")
    >>> clean.status, str(clean)
    (0, 'host a\\nnothing found')
    """

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    subject: str = ""
    ranks: int = 1
    matrix: LinkMatrix | None = None
    seen: tuple[str, ...] = ()
    have_met: bool = True

    @classmethod
    def of(
        cls, outcomes: Iterable[Outcome], subject: str = "", ranks: int = 1, matrix: LinkMatrix | None = None
    ) -> Examination:
        """Sort what checks have yielded; what several ranks have alike becomes one."""
        merged = _merged(outcomes)
        findings = [each for each in merged if isinstance(each, Finding)]
        findings.sort(key=lambda each: (_WORST_FIRST[each.severity], each.check))
        unchecked = tuple(each for each in merged if isinstance(each, Unchecked))
        return cls(tuple(findings), unchecked, subject, ranks, matrix)

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding; None without any."""
        return self.findings[0].severity if self.findings else None

    @property
    def status(self) -> int:
        """The exit status: 0 where nothing is worse than a note, 1 with a warning or an error."""
        return int(self.worst in ("error", "warning"))

    def __str__(self) -> str:
        lines = [self.subject] if self.subject else []
        lines += [each.text(self.ranks) for each in self.findings] or ["nothing found"]
        lines += [each.text(self.ranks) for each in self.unchecked]
        return "\n".join([*lines, *([str(self.matrix)] if self.matrix else []), *self.seen])

    def to_words(self) -> dict[str, Any]:
        """The same for programs, as JSON carries it."""
        return {
            "subject": self.subject,
            "ranks": self.ranks,
            "worst": self.worst,
            "status": self.status,
            "findings": [asdict(each) for each in self.findings],
            "unchecked": [asdict(each) for each in self.unchecked],
            "links": self.matrix.to_words() if self.matrix else None,
            "seen": list(self.seen),
        }


def _merged(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """What is alike but for the place, once, with all places."""
    found: dict[Outcome, list[Outcome]] = {}
    for each in outcomes:
        found.setdefault(replace(each, hosts=(), ranks=()), []).append(each)
    return [
        replace(
            key,
            hosts=tuple(dict.fromkeys(host for each in alike for host in each.hosts)),
            ranks=tuple(sorted({rank for each in alike for rank in each.ranks})),
        )
        for key, alike in found.items()
    ]


def _where(hosts: Sequence[str], ranks: Sequence[int], world_size: int) -> str:
    if not ranks or len(ranks) == world_size:
        return ""
    named = f" on {', '.join(hosts)}" if hosts else ""
    return f"{ranks_named(ranks)}{named}: "
