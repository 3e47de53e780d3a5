"""Checks of environment variables: unknown names, values that become something else, what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradwire.core.nearest import nearest
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Finding, Outcome, Severity
from gradwire.doctor.kinds import strtoll
from gradwire.doctor.nccl_variables import INTERNAL, NCCL_VARIABLES, PLUGINS
from gradwire.doctor.nccl_variables import SOURCE as NCCL_PAGE
from gradwire.doctor.torch_variables import CUDA_PAGE, DISTRIBUTED_PAGE, MEANT, TORCH_VARIABLES
from gradwire.doctor.variable import Variable, version_of

CHECK = "variables"
VARIABLES: Mapping[str, Variable] = {**NCCL_VARIABLES, **TORCH_VARIABLES}
"""All that are known, by name."""

_BEGINNINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "GLOO_")
SECRETS = frozenset({"NCCL_PSK"})
"""Keys: their values are never shown."""


def unknown_variables(facts: Facts) -> Iterator[Outcome]:
    """Names that nothing reads, with the name that is nearest."""
    for name, value in facts.environment.items():
        meant = MEANT.get(name)
        if meant is not None and meant not in facts.environment:
            yield _unknown(name, value, meant)
        elif _is_unknown(name):
            yield _unknown(name, value, nearest(name, {each: each for each in VARIABLES}))


def _is_unknown(name: str) -> bool:
    is_ours = name.startswith(_BEGINNINGS) and not name.startswith(PLUGINS)
    return is_ours and name not in VARIABLES and name not in INTERNAL


def _unknown(name: str, value: str, near: str | None) -> Finding:
    remedy = f"Did you mean {near}? " if near else ""
    return Finding(
        "warning",
        CHECK,
        f"{name} is a variable that nothing reads",
        shown(name, value),
        f"{remedy}Correct its name, or leave it out.",
        NCCL_PAGE if name.startswith("NCCL_") else DISTRIBUTED_PAGE,
    )


def misread_values(facts: Facts) -> Iterator[Outcome]:
    """Values that are not legal, or that are silently read as another one."""
    for name, value in facts.environment.items():
        variable = VARIABLES.get(name)
        misread = None if variable is None else variable.kind.misread(value)
        if variable is not None and misread is not None:
            severity: Severity = "error" if misread.stops else "warning"
            what = f"{shown(name, value)} {misread.becomes}"
            yield Finding(severity, CHECK, what, shown(name, value), misread.remedy, variable.source)


def old_variables(facts: Facts) -> Iterator[Outcome]:
    """Variables that are never read any more, or not by the version that is here."""
    here = version_of(facts.versions.get("nccl"))
    for name, value in facts.environment.items():
        variable = VARIABLES.get(name)
        if variable is None:
            continue
        since, removed = version_of(variable.since), version_of(variable.removed)
        if variable.removed is not None and (removed is None or here is None or here >= removed):
            said = f"since {variable.removed}" if removed else "by any version"
            what = f"{name} is not read {said} of NCCL"
            yield Finding("warning", CHECK, what, shown(name, value), variable.instead or "", variable.source)
        elif variable.instead is not None:
            what = f"{name} is an old name, which PyTorch still reads, and warns of"
            yield Finding("note", CHECK, what, shown(name, value), variable.instead, variable.source)
        elif name in NCCL_VARIABLES and since is not None and here is not None and here < since:
            version = facts.versions.get("nccl")
            yield Finding(
                "warning",
                CHECK,
                f"{name} is read since NCCL {variable.since}, and this is {version}",
                shown(name, value),
                "Leave it out, or take a newer NCCL.",
                variable.source,
            )


def contradictions(facts: Facts) -> Iterator[Outcome]:
    """Variables of one process that contradict each other."""
    environment = facts.environment
    sockets = [_number(environment, name, 1) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    if sockets[0] * sockets[1] > 64:
        yield _contradiction(
            environment,
            ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
            f"sockets of a connection would be {sockets[0] * sockets[1]}, and NCCL has 64 at most",
            "Lower one of them, so that their product is 64 or less.",
        )
    for low, high in (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")):
        if {low, high} <= {*environment} and _number(environment, low) > _number(environment, high):
            yield _contradiction(
                environment, (low, high), f"{low} is above {high}", "Lower the first, or leave it out."
            )
    if _number(environment, "NCCL_IB_DISABLE"):
        wanted = [name for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX") if name in environment]
        wanted += ["NCCL_NET"] if environment.get("NCCL_NET", "").lower() == "ib" else []
        if wanted:
            names = ("NCCL_IB_DISABLE", *wanted)
            yield _contradiction(
                environment, names, f"InfiniBand is off, and {wanted[0]} is about it", "Keep one of them."
            )
    if _number(environment, "NCCL_P2P_DISABLE") and environment.get("NCCL_P2P_LEVEL", "LOC") != "LOC":
        names = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
        yield _contradiction(environment, names, "access between GPUs is off and has a distance", "Keep one of them.")
    if _number(environment, "NCCL_MNNVL_ENABLE") == 1 and environment.get("NCCL_CUMEM_ENABLE") == "0":
        names = ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE")
        yield _contradiction(environment, names, "NVLink between hosts needs cuMem", "Leave NCCL_CUMEM_ENABLE out.")


def _contradiction(environment: Mapping[str, str], names: tuple[str, ...], what: str, remedy: str) -> Finding:
    evidence = ", ".join(shown(name, environment[name]) for name in names if name in environment)
    return Finding("warning", CHECK, f"variables contradict each other: {what}", evidence, remedy, NCCL_PAGE)


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    """A number as NCCL reads it."""
    text = environment.get(name, "")
    return strtoll(text).value if text.strip() else default


_LEFT_ON: tuple[tuple[str, tuple[str, ...], Severity, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "warning", "kernels run one at a time, so nothing overlaps", CUDA_PAGE),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "warning", "every collective is checked by another one", DISTRIBUTED_PAGE),
    ("NCCL_DEBUG", ("TRACE", "INFO"), "note", "NCCL logs each communicator on each rank", NCCL_PAGE),
)


def debugging_left_on(facts: Facts) -> Iterator[Outcome]:
    """Settings for debugging, which cost time in a run that has nothing to debug."""
    for name, values, severity, effect, source in _LEFT_ON:
        value = facts.environment.get(name, "")
        if value.upper() in values:
            what = f"{name} is on: {effect}"
            yield Finding(severity, CHECK, what, shown(name, value), "Leave it out once the trouble is found.", source)


def file_against_environment(facts: Facts) -> Iterator[Outcome]:
    """Files of NCCL that set what the environment sets otherwise, and what is wrong in them."""
    for path, settings in facts.nccl_files.items():
        for name, value in settings.items():
            own = facts.environment.get(name)
            if own is not None and own != value:
                yield Finding(
                    "warning",
                    CHECK,
                    f"{name} is set twice: {path} and the environment differ, and the environment counts",
                    f"{shown(name, value)} in {path}, {shown(name, own)} in the environment",
                    "Keep one of them.",
                    NCCL_PAGE,
                )
            misread = VARIABLES[name].kind.misread(value) if name in VARIABLES else None
            if misread is not None or _is_unknown(name):
                becomes = "nothing reads it" if misread is None else f"it {misread.becomes}"
                remedy = "Correct its name." if misread is None else misread.remedy
                yield Finding(
                    "warning", CHECK, f"{path} sets {shown(name, value)}, and {becomes}", path, remedy, NCCL_PAGE
                )


def missing_files(facts: Facts) -> Iterator[Outcome]:
    """Variables that name a file which is not there."""
    for name in facts.missing_files:
        yield Finding(
            "warning",
            CHECK,
            f"{name} names a file that is not there",
            shown(name, facts.environment.get(name, "")),
            "Correct the path on this host, or leave the variable out.",
            NCCL_PAGE,
        )


def shown(name: str, value: str) -> str:
    """A variable with its value; that of a key is not shown.

    >>> shown("NCCL_ALGO", "Ring"), shown("NCCL_PSK", "secret")
    ('NCCL_ALGO=Ring', 'NCCL_PSK=(hidden)')
    """
    return f"{name}={'(hidden)' if name in SECRETS else value}"
