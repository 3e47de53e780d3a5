"""Trainings on a mesh of several axes: one process, any layout, saves, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.core.errors import SpecError
from gradwire.ranks.supervised import RankFailure, run_function
from gradwire.training import configuration_of, read_configuration

CASES = str(Path(__file__).with_name("training_cases.py"))
EXAMPLES = Path(__file__).parents[1] / "examples"

BASE: dict[str, dict[str, Any]] = {
    "model": {"layers": 4, "width": 32, "heads": 4, "context": 33, "dtype": "float64"},
    "data": {"batch": 8, "micro_batches": 2, "text": str(Path(__file__).parents[1] / "docs" / "building")},
    "steps": {"count": 8, "warm_up": 2},
}
"""A length that does not divide, and micro-batches."""

EXPERTS = {"experts": 4, "layers": 2}

DENSE_LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp 8": {"dp": {"ranks": 8}, "data": {"micro_batches": 1}},
    "pp 2 x dp 2 x tp 2": {"pp": {"ranks": 2}, "dp": {"ranks": 2}, "tp": {"ranks": 2}},
    "pp 2 x dp 2 x tp 2, without sequence": {
        "pp": {"ranks": 2},
        "dp": {"ranks": 2},
        "tp": {"ranks": 2, "sequence": False},
    },
    "pp 2 x tp 4, interleaved": {"pp": {"ranks": 2, "schedule": "Interleaved1F1B"}, "tp": {"ranks": 4}},
    "pp 2 x cp 2 x tp 2, zero bubble": {
        "pp": {"ranks": 2, "schedule": "ZBVZeroBubble"},
        "cp": {"ranks": 2},
        "tp": {"ranks": 2},
    },
    "cp 2 x tp 2 x dp 2, PyTorch's styles": {
        "model": {"context": 32},
        "cp": {"ranks": 2},
        "tp": {"ranks": 2, "overlap": False},
        "dp": {"ranks": 2},
    },
    "dp 2 x cp 4": {"dp": {"ranks": 2}, "cp": {"ranks": 4}},
    "cp 4 x tp 2, contiguous": {"cp": {"ranks": 4, "layout": "contiguous"}, "tp": {"ranks": 2}},
    "dp 2 x cp 4, ulysses": {"dp": {"ranks": 2}, "cp": {"ranks": 4, "attention": "ulysses"}},
}
EXPERT_LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp 2 x ep 2 x cp 2": {"dp": {"ranks": 2}, "ep": {"ranks": 2}, "cp": {"ranks": 2}},
    "dp 2 x ep 4": {"dp": {"ranks": 2}, "ep": {"ranks": 4}, "data": {"batch": 16}},
    "ep 2 x cp 2 x tp 2": {"ep": {"ranks": 2}, "cp": {"ranks": 2}, "tp": {"ranks": 2}},
    "pp 2 x ep 2 x tp 2": {"pp": {"ranks": 2}, "ep": {"ranks": 2}, "tp": {"ranks": 2}},
    "pp 2 x dp 2 x ep 2": {"pp": {"ranks": 2}, "dp": {"ranks": 2}, "ep": {"ranks": 2}},
}


def tables(*changes: dict[str, dict[str, Any]], **model: Any) -> dict[str, dict[str, Any]]:
    """The base with other keys."""
    found = {name: dict(keys) for name, keys in BASE.items()}
    found["model"] |= model
    for change in changes:
        for name, keys in change.items():
            found[name] = found.get(name, {}) | keys
    return found


def off(found: Any, expected: Any) -> float:
    """The largest relative difference of losses and norms."""
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def require_alike(ranks: list[dict[str, Any]]) -> None:
    """What several ranks have of one parameter must be the same bits, and all are told the same figures."""
    known: dict[str, str] = {}
    for rank in ranks:
        assert rank["figures"] == ranks[0]["figures"]
        for name, digest in rank["parts"].items():
            assert known.setdefault(name, digest) == digest, name


# One process --------------------------------------------------------------------------------------------------------


@pytest.mark.draw(1)
@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_one_process_trains_what_a_plain_model_trains(model: dict[str, int]) -> None:
    (found,) = run_function(f"{CASES}:beside_twin", 1, {"tables": tables(**model), "steps": 8}, 120)
    assert off(found["figures"], found["twin"]) < 1e-12
    assert found["figures"][-1][0] < found["figures"][0][0]


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_shape_knows_its_parameters(model: dict[str, int]) -> None:
    ((said, made),) = run_function(f"{CASES}:counted", 1, {"tables": tables(**model)}, 120)
    assert said == made


# Layouts -------------------------------------------------------------------------------------------------------------


@pytest.mark.turns("eight ranks", 1)
@pytest.mark.draw(1)
@pytest.mark.parametrize(
    ("layouts", "model"), [(DENSE_LAYOUTS, {}), (EXPERT_LAYOUTS, EXPERTS)], ids=["dense", "experts"]
)
def test_every_layout_trains_what_one_process_trains(layouts: dict[str, Any], model: dict[str, int]) -> None:
    steps, given = 4, {name: tables(layout, **model) for name, layout in layouts.items()}
    alone = [tables({"data": each["data"]}, **each["model"]) for each in given.values()]
    (expected,) = run_function(f"{CASES}:trained", 1, {"layouts": alone, "steps": steps}, 240)
    ranks = run_function(f"{CASES}:trained", 8, {"layouts": list(given.values()), "steps": steps}, 240)
    for place, name in enumerate(given):
        require_alike([rank[place] for rank in ranks])
        assert off(ranks[0][place]["figures"], expected[place]["figures"]) < 1e-11, name


@pytest.mark.long
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_the_examples_have_the_loss_curve_of_one_process(name: str) -> None:
    configuration = read_configuration(EXAMPLES / f"{name}.toml")
    given = configuration.as_tables()
    alone = {
        table: {key: 1 if key == "ranks" else value for key, value in keys.items()} for table, keys in given.items()
    }
    (expected,) = run_function(f"{CASES}:trained", 1, {"layouts": [alone], "steps": 50}, 240)
    ranks = run_function(f"{CASES}:trained", configuration.ranks, {"layouts": [given], "steps": 50}, 240)
    losses, twin = ([loss for loss, _ in each[0]["figures"]] for each in (ranks[0], expected))
    assert max(abs(a / b - 1) for a, b in zip(losses, twin, strict=True)) < 1e-4
    assert losses[-1] < 0.75 * losses[0]
    require_alike([rank[0] for rank in ranks])


@pytest.mark.turns("eight ranks", 1)
@pytest.mark.draw(1)
@pytest.mark.parametrize("method", ["int8", "topk:0.05", "powersgd:2", "fp16,node=auto"])
def test_any_method_leaves_ranks_with_the_same_bits(method: str) -> None:
    three = {"pp": {"ranks": 2}, "dp": {"ranks": 2, "method": method}, "tp": {"ranks": 2}}
    experts = {"ep": {"ranks": 2}, "dp": {"ranks": 2, "method": method}, "cp": {"ranks": 2}}
    layouts = [tables(three, dtype="float32"), tables(experts, **EXPERTS, dtype="float32")]
    ranks = run_function(f"{CASES}:trained", 8, {"layouts": layouts, "steps": 3}, 240)
    for place in range(2):
        require_alike([rank[place] for rank in ranks])


@pytest.mark.turns("eight ranks", 1)
def test_codecs_of_all_axes_train_too() -> None:
    dense = {"pp": {"ranks": 2, "codec": "int8"}, "dp": {"ranks": 2}, "tp": {"ranks": 2, "codec": "int8:32"}}
    experts = {"ep": {"ranks": 2, "codec": "int8:32"}, "cp": {"ranks": 2, "codec": "int8:8"}, "dp": {"ranks": 2}}
    layouts = [tables(dense), tables(experts, **EXPERTS)]
    (exact,) = run_function(f"{CASES}:trained", 1, {"layouts": [tables(), tables(**EXPERTS)], "steps": 4}, 240)
    ranks = run_function(f"{CASES}:trained", 8, {"layouts": layouts, "steps": 4}, 240)
    for place in range(2):
        require_alike([rank[place] for rank in ranks])
        found, expected = ranks[0][place]["figures"], exact[place]["figures"]
        assert 1e-9 < off(found, expected) < 0.05


# Saves ---------------------------------------------------------------------------------------------------------------


@pytest.mark.turns("eight ranks", 1)
@pytest.mark.draw(1)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"pp": {"ranks": 2, "codec": "qsgd:8"}, "dp": {"ranks": 2, "method": "int4"}, "tp": {"ranks": 2}}, {}),
        ({"dp": {"ranks": 2, "method": "int4"}, "ep": {"ranks": 2}, "cp": {"ranks": 2}}, EXPERTS),
    ],
    ids=["dense", "experts"],
)
@pytest.mark.turns("going on", 1)
def test_a_training_goes_on_exactly(layout: dict[str, Any], model: dict[str, int], tmp_path: Path) -> None:
    given = tables(layout, **model, dtype="float32")
    told = {"tables": given, "steps": 3, "folder": str(tmp_path), "others": [given], "drop_owed": False}
    for rank in run_function(f"{CASES}:resumed", 8, told, 240):
        (other,) = rank["others"]
        assert other["figures"] == rank["straight"]
        assert other["parts"] == rank["parts"]
    assert [each.name for each in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.turns("eight ranks", 1)
@pytest.mark.draw(1)
@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_training_goes_on_under_any_layout(model: dict[str, int], tmp_path: Path) -> None:
    layouts = EXPERT_LAYOUTS if model else DENSE_LAYOUTS
    alike = [each for each in layouts.values() if not {"data", "model"} & set(each)]  # others have other batches
    first, *others = [tables(each, **model) for each in alike]
    told = {"tables": first, "steps": 3, "folder": str(tmp_path), "others": others, "drop_owed": False}
    ranks = run_function(f"{CASES}:resumed", 8, told, 240)
    for place in range(len(others)):
        assert off(ranks[0]["others"][place]["figures"], ranks[0]["straight"]) < 1e-11


@pytest.mark.turns("eight ranks", 1)
def test_what_is_owed_is_shared_by_other_replicas_and_lost_by_nobody(tmp_path: Path) -> None:
    saved = tables({"pp": {"ranks": 2}, "dp": {"ranks": 2, "method": "topk:0.1"}, "cp": {"ranks": 2}})
    shared = tables({"pp": {"ranks": 2}, "dp": {"ranks": 4, "method": "topk:0.1"}})
    split = tables({"tp": {"ranks": 4}, "dp": {"ranks": 2, "method": "topk:0.1"}})
    told = {"tables": saved, "steps": 2, "folder": str(tmp_path), "others": [shared, split], "drop_owed": False}
    for rank in run_function(f"{CASES}:resumed", 8, told, 240):
        goes_on, error = rank["others"]
        assert goes_on["figures"][0][0] == pytest.approx(rank["straight"][0][0], rel=1e-9)
        assert "take the same pp, ep and tp, or leave them out (--drop-owed)" in error["error"]
    told |= {"folder": str(tmp_path / "again"), "others": [split], "drop_owed": True}
    for rank in run_function(f"{CASES}:resumed", 8, told, 240):
        (goes_on,) = rank["others"]
        assert goes_on["figures"][0][0] == pytest.approx(rank["straight"][0][0], rel=1e-9)


def test_another_model_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "step-000009.copy").mkdir()
    others = [tables(width=64), tables({"dp": {"method": "int8"}})]
    told = {"tables": tables(), "steps": 1, "folder": str(tmp_path), "drop_owed": False, "others": others}
    (rank,) = run_function(f"{CASES}:resumed", 1, told, 120)
    assert "has [model] width = 32, and the configuration 64" in rank["others"][0]["error"]
    assert rank["others"][1]["figures"] == rank["straight"]
    with pytest.raises(RankFailure, match="is of another training: resume that one, or give another folder"):
        run_function(f"{CASES}:resumed", 1, told, 120)


@pytest.mark.one_draw_in(2)
def test_another_method_goes_on_from_what_owes_nothing(tmp_path: Path) -> None:
    exact, rough, other = (tables({"dp": {"ranks": 2, "method": each}}) for each in ("none", "int4", "topk:0.1"))
    told = {"tables": exact, "steps": 2, "folder": str(tmp_path / "exact"), "drop_owed": False, "others": [rough]}
    for rank in run_function(f"{CASES}:resumed", 2, told, 120):
        assert rank["others"][0]["figures"][0] == pytest.approx(rank["straight"][0], rel=0.2)
    told |= {"tables": rough, "folder": str(tmp_path / "rough"), "others": [other, rough]}
    for rank in run_function(f"{CASES}:resumed", 2, told, 120):
        assert "with [dp] method 'int4', and the method is 'topk:0.1': take that one" in rank["others"][0]["error"]
        assert rank["others"][1]["figures"] == rank["straight"]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("[dp]\nrank = 2", 2, "[dp] rank: there is no such key: did you mean 'ranks'?"),
        ("[modle]\nheads = 2", 1, "[modle]: there is no such table: did you mean 'model'?"),
        ("[dp]\nranks = 2.5", 2, "[dp] ranks: 2.5 is not a whole number"),
        ("[dp]\nranks = true", 2, "[dp] ranks: True is not a whole number"),
        ("[dp]\nranks = 0", 2, "[dp] ranks: 0 is too small: take 1 or more"),
        ("[tp]\nranks = 3", 2, "[tp] ranks: 3 does not divide heads of 4: take 2"),
        ("[model]\nheads = 5", 2, "[model] heads: 5 does not divide a width of 64: take 4"),
        ("[model]\nexperts = 6\n[ep]\nranks = 4", 4, "[ep] ranks: 4 does not divide experts of 6: take 3"),
        ("[ep]\nranks = 2", 2, "[ep] ranks: there are no experts to share: set [model] experts"),
        ("[model]\nexperts = 2\nchosen = 3", 3, "[model] chosen: 3 of 2 experts: take fewer"),
        ("[data]\nbatch = 15\n[dp]\nranks = 2", 2, "2 ranks of dp and ep with 1 micro-batches each: take 16"),
        ("[model]\ncontext = 6\n[cp]\nranks = 4", 2, "[model] context: 6 positions on 4 ranks: take 8 or more"),
        ("[cp]\nlayout = 'zigzg'", 2, "[cp] layout: 'zigzg' is unknown: did you mean 'zigzag'?"),
        ("[pp]\nranks = 2\nschedule = '2F2B'", 3, "[pp] schedule:"),
        ("[model]\nlayers = 1\n[pp]\nranks = 2", 2, "[model] layers: 1 layers in 2 stages: take 2 or more"),
        ("[dp]\nmethod = 'int9000'", 2, "[dp] method:"),
        ("[dp]\nmethod = 'auto'", 2, "[dp] method: write a method, such as int8"),
        ("[dp]\nmethod = 'gossip'", 2, "[dp] method: 'gossip' goes with the optimizer"),
        ("[dp]\nmethod = 'none,weights=given'", 2, "leave weights=given out"),
        ("[dp]\nmethod = 'dp:1'", 2, "[dp] method: dp:1: it bounds what a rank gives of a whole model"),
        ("[dp]\nmethod = 'none,exchange=auto'", 2, "leave exchange=auto out"),
        ("[dp]\nranks = 2\nmethod = 'krum:1'", 3, "[dp] method: krum:1 needs at least 5 ranks"),
        (
            "[model]\nwidth = 512\nheads = 1\n[cp]\ncodec = 'qsgd:8'",
            5,
            "[cp] codec: qsgd:8 would draw the same numbers in each step",
        ),
        ("[steps]\nlr = 1e300", 2, "[steps] lr: 1e+300 would leave nothing of the parameters: take 1000 or less"),
        (
            "[model]\ncontext = 15\n[cp]\nranks = 2\n[tp]\nranks = 2\noverlap = false",
            7,
            "PyTorch's styles do not cut 7 positions into 2 pieces",
        ),
        ("[tp]\ncodec = 'int8:48'", 2, "[tp] codec:"),
        ("[tp]\nsequence = false\ncodec = 'int8:64'", 3, "[tp] codec: PyTorch's styles have none"),
        (
            "[tp]\nranks = 2\noverlap = false\n[model]\ncontext = 33",
            3,
            "PyTorch's styles do not cut 33 positions",
        ),
        ("[steps]\nlr = nan", 2, "[steps] lr: nan is no number to train with"),
        ("[steps]\nlr = -1.0", 2, "[steps] lr: -1.0 would move nothing"),
        ("dp = 3", None, "[dp]: 3 is no table: write [dp] and its keys below it"),
    ],
)
def test_a_file_is_refused_with_its_line(text: str, line: int | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        read_configuration(path)
    assert told in str(error.value)
    assert (f"{path}, line {line}: " if line else f"{path}: ") in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_configuration(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[dp\nranks = 2")
    with pytest.raises(SpecError, match=r"is no TOML: .*line 1"):
        read_configuration(tmp_path / "broken.toml")


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(SpecError, match=r"multiply to 4, and 6 ranks run: start 4, or set .dp. ranks = 3$"):
        configuration_of({"dp": {"ranks": 2}, "tp": {"ranks": 2}}).require_ranks(6)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"steps": {"lr": 0.5}}, "[steps] lr is 0.5 on rank 1 and 0.002 on rank 0"),
        ({"dp": {"ranks": 1}, "cp": {"ranks": 2}}, "[dp] ranks is 1 on rank 1 and 2 on rank 0"),
        ({"dp": {"ranks": 3}}, "[dp] ranks: the axes (dp 3) multiply to 3, and 2 ranks run"),
        ({"data": {"text": "/nowhere"}}, "[data] text: /nowhere is not a folder"),
        ({"model": {"context": 100_000_000}}, "[model] context: 100000000 positions, and the text has"),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_to_all(other: dict[str, Any], told: str) -> None:
    given = [tables({"dp": {"ranks": 2}}), tables({"dp": {"ranks": 2}, "data": {"batch": 12}}, other)]
    given[1]["data"]["batch"] = 6 if other.get("dp", {}).get("ranks") == 3 else 8
    for said in run_function(f"{CASES}:refused", 2, {"tables": given}, 60):
        assert told in said


# The command ---------------------------------------------------------------------------------------------------------
@pytest.mark.turns("going on", 1)
def test_the_command_trains_saves_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text("[model]\nlayers = 2\nwidth = 32\n[steps]\ncount = 6\n[dp]\nranks = 2\nmethod = 'int8'\n")

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "gradwire", "train", str(path), "--save", str(tmp_path / "saves"), *words]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return found.stdout

    first = run("--every", "3", "--log-every", "3")
    assert "dp 2, method int8, " in first
    assert sorted(each.name for each in (tmp_path / "saves").iterdir()) == ["step-000003", "step-000006"]
    (tmp_path / "saves" / "step-000006").rename(tmp_path / "away")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run()
    assert "holds saves of a training: add --resume, or give another folder" in refused.value.stderr
    again = run("--resume", "--log-every", "3")
    assert "going on from step 3" in again

    def line(text: str) -> str:
        return next(each for each in text.splitlines() if each.startswith("step     6")).partition(", gradient")[0]

    assert line(first) == line(again)
    assert math.isfinite(float(line(first).rpartition(" ")[2]))
