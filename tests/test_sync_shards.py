"""`gradwire.sync` over sharded models: two copies on two ranks each."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradwire.ranks.supervised import run_function
from sync_shards_cases import CODED, METHODS

CASES = str(Path(__file__).with_name("sync_shards_cases.py"))
WAYS = ("plain", "attached", "accumulated", "frozen", "tied", "offloaded")
HERE = 'group=mesh["replicate"].get_group()'

Job = tuple[str, dict[str, Any]]

JOBS: dict[str, dict[str, Job]] = {
    "as_whole": {name: ("as_whole", {"name": name}) for name in METHODS},
    "coded": {name: ("coded", {"name": name}) for name in ("int8", "sparse")},
    "ways": {name: ("ways", {"variant": name}) for name in WAYS},
    "others": {
        "sizes": ("sizes", {}),
        "not finite": ("not_finite", {"name": "int8"}),
        "not finite, plain": ("not_finite", {"name": "diloco"}),
        "not finite, sparse": ("not_finite", {"name": "sparse"}),
        "skipped": ("skipped", {"infinite": True}),
        "not skipped": ("skipped", {"infinite": False}),
        "buffers": ("buffers", {}),
        "evaluated": ("evaluated", {}),
        "hierarchy": ("hierarchy", {}),
    },
    "refused": {"refused": ("refused", {})},
}
"""Cases that one set of processes runs."""


def run(case: str, ranks: int = 4, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 280)


@functools.cache
def outcomes(kind: str, *names: str) -> list[dict[str, Any]]:
    """What every rank saw of these cases; of all of a kind where none are named."""
    jobs = JOBS[kind]
    return run("many", jobs={name: jobs[name] for name in names or jobs})


Siblings = list[Mapping[str, Any]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.draw(4)
def test_shards_are_averaged_as_whole_models_are(method: str, siblings: Siblings) -> None:
    every = outcomes("as_whole", *(case["method"] for case in siblings))
    assert len({outcome[method]["digest"] for outcome in every}) == 1
    for outcome in every:
        found = outcome[method]
        assert found["windows"] == found["wanted windows"]
        assert found["windows"].count(0) >= 3
        assert found["moved"] > 0.05
        assert max(found["mid-window"], found["copies"], found["end"]) < 1e-12


@pytest.mark.parametrize("method", ["int8", "sparse"])
@pytest.mark.turns("one shard", 1)
def test_a_shard_is_coded_by_itself_and_keeps_what_it_owes(method: str) -> None:
    for outcome in outcomes("coded"):
        found = outcome[method]
        assert found["far"] < 1e-9
        assert found["owed"] < 1e-6
        assert found["norm"] > 1e-3
    assert len({outcome[method]["digest"] for outcome in outcomes("coded")}) == 1


@pytest.mark.parametrize("variant", WAYS)
@pytest.mark.draw(3)
def test_copies_are_equal_whatever_fsdp2_does_within_them(variant: str, siblings: Siblings) -> None:
    every = outcomes("ways", *(case["variant"] for case in siblings))
    assert len({outcome[variant]["digest"] for outcome in every}) == 1
    for outcome in every:
        found = outcome[variant]
        assert found["losses"][-1] < found["losses"][0] - 0.5
        frozen = [name for name in found["still"] if name.startswith(("blocks.1.", "blocks.2.up."))]
        assert bool(frozen) == (variant == "frozen")
        assert not set(found["still"]) & set(found["trained"])


@pytest.mark.turns("one shard", 1)
def test_what_is_kept_has_the_size_of_a_shard() -> None:
    found = [outcome["sizes"] for outcome in outcomes("others")]
    for one in found:
        assert one["copies"] == one["momentum"] == one["owed"] == one["shard"] < 0.6 * one["model"]
    assert found[0]["shard"] + found[1]["shard"] == found[0]["model"]


# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CODED, "diloco", "streaming"])
@pytest.mark.draw(1)
@pytest.mark.turns("one shard", 1)
def test_a_run_goes_on_exactly_from_mid_window(name: str, tmp_path: Path) -> None:
    first, again = (run("resumed", folder=str(tmp_path), again=again, name=name) for again in (False, True))
    assert first == again
    assert len({one.split()[0] for one in first}) == 2  # the copies were apart
    if name not in ("streaming", "late"):
        assert len({one.split()[1] for one in first}) == 1


@pytest.mark.turns("saved", 1)
def test_another_number_of_copies_goes_on_and_owes_as_much(tmp_path: Path) -> None:
    saved = run("other_copies", 4, folder=str(tmp_path), saves=True)
    for shard, one in enumerate(run("other_copies", 2, folder=str(tmp_path), saves=False)):
        assert one["step"] == 6
        assert one["copy"] == saved[0]["copy"]
        assert one["owed"] == pytest.approx(saved[shard]["owed"], rel=1e-5)
        assert abs(one["owed"]) > 1e-4
        assert "within a window" in one["within"]


@pytest.mark.turns("saved", 1)
def test_a_save_that_lacks_a_file_is_taken_up_by_no_rank(tmp_path: Path) -> None:
    for said, steps in run("damaged", folder=str(tmp_path)):
        assert "rank 3 finds no rank3.safetensors" in said
        assert steps == "same"


# What one rank sees holds for all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["not finite, plain", "not finite", "not finite, sparse"])
def test_a_shard_that_is_not_finite_is_told_on_all_ranks_which_give_the_window_up_alike(case: str) -> None:
    for outcome in outcomes("others"):
        found = outcome[case]
        name = "blocks.1.up.weight" if case.endswith("plain") else "embedding.weight"  # codecs spread it over a grain
        assert found["said"].startswith(f"StepError: '{name}' is not finite on some rank at the end of a window")
        assert found["kept"]
        assert (found["owed"] > 0) != case.endswith("plain")
    assert len({outcome[case]["digest"] for outcome in outcomes("others")}) == 1


def test_a_step_that_a_scaler_skips_on_one_rank_is_skipped_by_its_copy_and_counts() -> None:
    found = [outcome["skipped"] for outcome in outcomes("others")]
    assert [one["scale"] for one in found] == [1024.0, 1024.0, 512.0, 512.0]
    assert all(one["far"] < 1e-12 and one["since"] == 0 for one in found)
    without = {outcome["not skipped"]["digest"] for outcome in outcomes("others")}
    assert len({one["digest"] for one in found}) == len(without) == len({found[0]["digest"]} - without) == 1


@pytest.mark.parametrize("how", ["in a step", "before"])
@pytest.mark.turns("failure", 1)
def test_a_rank_that_fails_keeps_nobody_waiting(how: str, tmp_path: Path) -> None:
    """In a step nobody else has failed; before a backward pass FSDP2 waits for it as well."""
    found = run("failing", folder=str(tmp_path), how=how)
    assert found[1]["said"].startswith("ValueError")
    assert max(one["waited"] for one in found) < 20
    others = [found[rank]["said"] for rank in (0, 2, 3)]
    assert all(others)
    assert "rank 1 failed with ValueError: no more" in others[-1]
    if how == "in a step":
        assert all("rank 1 failed with ValueError: no more memory" in said for said in others)


@pytest.mark.turns("failure", 1)
def test_a_silent_rank_is_an_error_on_all_ranks_after_the_deadline(tmp_path: Path) -> None:
    found = run("failing", folder=str(tmp_path), how="silent")
    assert all(one["said"].startswith("CommunicationError") for rank, one in enumerate(found) if rank != 1)
    assert "rank 1" in found[0]["said"]
    assert "rank 1" in found[3]["said"]
    assert max(one["waited"] for one in found) < 25


# What else a model has ----------------------------------------------------------------------------------------------


def test_buffers_are_those_of_all_ranks() -> None:
    found = [outcome["buffers"] for outcome in outcomes("others")]
    for policy in ("average", "rank0", "own"):
        had = [one[policy]["had"] for one in found]
        assert len({tuple(one) for one in had}) == 4
        mean = [sum(values) / 4 for values in zip(*had, strict=True)]
        for rank, one in enumerate(found):
            wanted = {"average": mean, "rank0": had[0], "own": had[rank]}[policy]
            assert one[policy]["has"] == pytest.approx(wanted, abs=1e-6)


def test_the_global_copy_is_evaluated_and_nothing_of_it_stays() -> None:
    found = [outcome["evaluated"] for outcome in outcomes("others")]
    assert len({loss for one in found for loss in one["losses"]}) == 1
    assert all(one["own"] != one["losses"][0] and one["far"] == 0 for one in found)


def test_levels_of_a_hierarchy_average_shards() -> None:
    for outcome in outcomes("others"):
        assert outcome["hierarchy"]["nodes"] < 1e-12
        assert outcome["hierarchy"]["places"] < 1e-12
    assert len({outcome["hierarchy"]["digest"] for outcome in outcomes("others")}) == 1


# What is refused ----------------------------------------------------------------------------------------------------

WHOLE = "wants whole tensors, and these are shards"
REFUSED = {
    "all": f"hold different shards of one copy of the model, and cannot average them: pass .* {HERE}",
    "shards": "hold different shards of one copy",
    "two dimensions": "sharded over a mesh of 2 dimensions",
    "part": "is whole on this rank, and other parameters of the model are sharded: call fully_shard on the root",
    "apart": "'head.bias' differs between rank 1 and rank 3",
    "settings": "ranks of one copy disagree on the settings: rank . has .*every=Constant",
    "methods": "ranks of one copy disagree on the settings: rank . has .*method='int8'",
    "other copy": "ranks disagree on the settings: rank . has .*every=Constant",
    "tiny": "holds no element of",
    "crossed": "shard . of 2",
    "gossip": WHOLE,
    "dion": WHOLE,
    "session": WHOLE,
    "elastic": WHOLE,
    "asynchronous": WHOLE,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_told_on_every_rank(what: str) -> None:
    for outcome in outcomes("refused"):
        said = outcome["refused"][what]
        expected = REFUSED[what].replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")
        assert re.search(expected, said), said
        assert said.startswith("AttachError")


def test_the_page_runs_on_two_copies() -> None:
    assert run("page") == [20] * 4
