"""The table of a profile, and the sentences that say what to look at."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.core.figures import listed, si_bytes
from gradwire.profiling.account import KINDS, Account
from gradwire.profiling.tensors import tensor_lines
from gradwire.topology.link_matrix import said_of, shared_end, slow_links

LATE_SHARE = 0.05
"""Of a step, that the others wait for a rank before it is named."""

SLOW_RATIO = 1.3
"""How many times as long as the others a rank computes before it is called slower."""


def summary(found: Account) -> str:
    """Return a table of all ranks, milliseconds a step, and sentences that say what it means."""
    methods = ", ".join(found.methods) or "no communication"
    lines = [f"{found.steps} steps of {1e3 * found.step_s:.1f} ms, {methods}", ""]
    headings = ("step", *KINDS, "of it", "sent", "overlap")
    lines.append(f"{'ms a step':10s} " + " ".join(f"{heading:>9s}" for heading in headings))
    for rank in found.ranks:
        times = [rank.step_s, *(rank.seconds[kind] for kind in KINDS)]
        cells = [f"{1e3 * seconds:9.1f}" for seconds in times]
        rest = f"{rank.accounted:9.1%} {si_bytes(rank.sent_bytes):>9s} {rank.efficiency:9.0%}"
        lines.append(f"{f'rank {rank.rank}':10s} " + " ".join(cells) + f" {rest}")
    lines += ["", *tensor_lines(found.tensors)]
    lines += ["", *findings(found)]
    return "\n".join(lines).rstrip()


def findings(found: Account) -> Iterator[str]:
    """What to look at, worst first."""
    if not found.steps:
        yield "No step has ended in the block: loop over profile.steps(loader), or call profile.step() after each step."
    if found.missing:
        yield f"The records of ranks {listed(list(found.missing))} are missing: what others waited for them is counted."
    for rank, last in found.unfinished.items():
        yield (
            f"The end of rank {rank} is missing: its process ended in mid-profile, as by SIGKILL, and the last step "
            f"that it had written is step {last}."
        )
    step_s = found.step_s
    late = sorted(found.ranks, key=lambda rank: -found.caused_s(rank.rank))
    for rank in late:
        caused_s = found.caused_s(rank.rank)
        if step_s <= 0 or caused_s < LATE_SHARE * step_s:
            break
        said = f"The others wait {1e3 * caused_s:.1f} ms a step for rank {rank.rank} on {rank.host}"
        ratio = found.compute_ratio(rank.rank)
        why = f", which computes and reads {ratio:.1f} times as long as they do" if ratio >= SLOW_RATIO else ""
        yield f"{said} ({caused_s / step_s:.0%} of a step){why}."
    yield from _of_links(found)
    for kind, what in (("transfer", "bytes that travel"), ("data", "the next batch")):
        mean_s = sum(rank.seconds[kind] for rank in found.ranks) / max(1, len(found.ranks))
        if step_s > 0 and mean_s > 0.2 * step_s:
            yield f"Ranks wait {1e3 * mean_s:.1f} ms a step for {what} ({mean_s / step_s:.0%} of a step)."


def _of_links(found: Account) -> Iterator[str]:
    """Links that carry much less than others, or take much longer."""
    slow = slow_links(found.links)
    end = shared_end(slow, found.links)
    if end is not None:
        yield f"The link of rank {end} is slow, and no other one: {said_of(slow[0])}."
        return
    for link in slow:
        yield f"A link is slow: {said_of(link)}."
