"""Nothing that does nothing passes silently: an option that a spec may have changes what is sent or what results.

Every method of the registry is tried with every option, on virtual ranks. What is taken must differ from the spec
without it, in bytes, collectives or bits of a result, unless the value says what is so anyway: then it builds the same.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

import gradwire
from gradwire.codecs import BlockInt, Chain, Identity, TopK
from gradwire.core.errors import CompositionError, GradwireError
from gradwire.reducers import DGC
from gradwire.spec import parse_codec
from option_cases import Tried, behaviour, heads, parsed, tried

TRIED: dict[str, list[Tried]] = defaultdict(list)
for each in tried():
    TRIED[each.head].append(each)

SPARES_A_PASS = {"affine,ef=off,guard=off"}
"""Without memory and with one scale for all, a NaN spoils the whole tensor: a guard sees to that where it is not so."""


def without_effect(case: Tried) -> list[str]:
    """The specs that are taken, ask for something, and change nothing."""
    accepted, found = 0, list[str]()
    for before, after in case.specs():
        base, reducer = parsed(before), parsed(after)
        assert base is not None, before
        if reducer is None or reducer == base:
            continue
        accepted += 1
        if behaviour(reducer) != behaviour(base):
            if case.any_will_do:
                return []
        elif after not in SPARES_A_PASS:
            found.append(after)
    return found if accepted else []


@pytest.mark.parametrize("head", TRIED)
@pytest.mark.draw(6)
def test_what_an_option_asks_for_happens(head: str) -> None:
    assert [spec for case in TRIED[head] for spec in without_effect(case)] == []


def test_every_method_is_tried_with_every_option_that_it_has() -> None:
    names = {re.split(r"[+:,]", head)[0] for head in heads()}
    assert names == set(gradwire.methods())
    assert all(parsed(head) for head in TRIED)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("head", ["topk:0.1", "randomk:0.2"])
def test_what_stands_after_a_plus_changes_what_is_sent(head: str) -> None:
    for name in gradwire.methods():
        if reducer := parsed(f"{head}+{name},ef=off,guard=off,exchange=allgather"):
            assert behaviour(reducer) != behaviour(gradwire.parse(f"{head},ef=off,guard=off,exchange=allgather")), name


# What is refused, and what is taken though it changes nothing

REFUSED = {
    "none,ef=on": "nothing to remember",
    "none,ef=ef21": "nothing to remember",
    "none,exchange=twoshot,ef=on,decay=0.5": "nothing to remember",
    "krum:1,ef=on": "nothing to remember",
    "adasum,ef=on": "nothing to remember",
    "none,warmup=10": "int4,warmup=100",
    "none,vectors=off": "uncompressed anyway: leave it out",
    "powersgd:4,vectors=off": "uncompressed anyway: leave it out",
    "sketch:8,vectors=off": "uncompressed anyway: leave it out",
    "powersgd:4,ef=off,sent=mean": "leave one of sent and ef=off out",
    "topk:0.1+none": "leave it out",
    "topk:0.1+int8,values=bf16": "leave it out",
    "int4,exchange=allgatherv": "write exchange=allgather",
    "dgc:0.25,ramp=3": "leave ramp out",
    "dgc:0.01,worker_momentum=0.9": "leave worker_momentum out",
    "topk:1": "write 'none'",
}


@pytest.mark.parametrize(("spec", "remedy"), REFUSED.items())
def test_what_would_do_nothing_is_refused_with_what_to_do(spec: str, remedy: str) -> None:
    with pytest.raises(GradwireError, match=re.escape(remedy)) as raised:
        gradwire.parse(spec)
    text = str(raised.value)
    assert len(text) < 240
    assert not any(end in text for end in (". ", "? ", "\n", "{"))


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("int4,node=1", "int4"),
        ("int4,worker_momentum=0", "int4"),
        ("dgc:0.1,worker_momentum=0", "dgc:0.1"),
        ("none,warmup=0,vectors=on,ef=off", "none"),
        ("topk:0.1,ef=on,decay=1,residual=fp32,guard=on", "topk:0.1"),
    ],
)
def test_a_value_that_says_what_is_so_anyway_builds_the_same(spec: str, same: str) -> None:
    assert gradwire.parse(spec) == gradwire.parse(same)


def test_a_codec_alone_has_no_memory_of_nothing() -> None:
    for spec in ("none,ef=on", "fp16,decay=0.5", "qsgd:15,ef=off,decay=0.5"):
        with pytest.raises(GradwireError, match=r"nothing to remember|add ef=on"):
            parse_codec(spec)


def test_the_same_by_hand() -> None:
    for build in (
        lambda: Chain(TopK(0.1), Identity()),
        lambda: Chain(TopK(0.1, "bf16"), BlockInt(8)),
        lambda: DGC(0.5, ramp=2),
    ):
        with pytest.raises(CompositionError, match="leave"):
            build()
