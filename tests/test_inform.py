"""The registry, `gradwire cost` and `gradwire --version` agree; `test_catalogue.py` has `gradwire methods`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import gradwire
from gradwire import bench, doctor, simulation
from gradwire.cli.main import main
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.options import described
from gradwire.drivers.cost import specs_on
from gradwire.drivers.plan import plan
from gradwire.drivers.timing import step_s
from gradwire.kernels.dispatch import KERNELS

ROOT = Path(__file__).parents[1]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_the_package_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"gradwire {gradwire.__version__} (Python 3.")
    assert "PyTorch 2." in said
    assert project()["dynamic"] == ["version"]  # it stands in the package alone
    assert gradwire.__version__ == importlib.metadata.version("gradwire")


@pytest.mark.parametrize("name", gradwire.methods())
def test_a_default_that_is_shown_is_the_default(name: str) -> None:
    """Written out, the options build what the bare name does."""
    method = gradwire.methods()[name]
    shown = [option.split("|")[0] for option in described(method.options)]
    needed = [f.name for f in dataclasses.fields(method.build) if f.default is dataclasses.MISSING and f.init]  # type: ignore[arg-type]
    given = {f"{option}=FLOAT": f"{option}=1.5" for option in needed}
    bare = ",".join([name, *(given[option] for option in shown if option in given)])
    assert gradwire.parse(",".join([name, *(given.get(option, option) for option in shown)])) == gradwire.parse(bare)


# Cost


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))


@pytest.mark.parametrize("spec", ["int4", "topk:0.01", "powersgd:2", "none,exchange=tree"])
def test_cost_takes_a_spec_as_attach_does(spec: str) -> None:
    assert gradwire.cost(spec, model(), 4) == gradwire.cost(gradwire.parse(spec), model(), 4)
    link = Link(1e-3, 1e-9)
    assert step_s(spec, model(), 4, link) == step_s(gradwire.parse(spec), model(), 4, link)


def test_cost_takes_a_model_or_its_parameters() -> None:
    wanted = gradwire.cost("powersgd:2", model(), 4)
    specs = [ParameterSpec(n, tuple(p.shape), p.dtype, p.device) for n, p in model().named_parameters()]
    for given in (model().parameters(), model().named_parameters(), list(model().parameters()), specs):
        assert gradwire.cost("powersgd:2", given, 4) == wanted


def test_cost_counts_what_is_trained() -> None:
    frozen = model()
    frozen[0].requires_grad_(False)
    for given in (frozen, frozen.parameters()):
        assert gradwire.cost("none", given, 2).dense_bytes == 4 * (20 * 10 + 10)


@pytest.mark.parametrize(
    ("spec", "given", "ranks", "remedy"),
    [
        ("int5x", model(), 4, "did you mean 'int5'"),
        ("krum:1", model(), 4, "at least 5 ranks"),
        ("int4", model(), 0, "at least 1 rank"),
        ("int4", "bytes", 4, "pass a module"),
        ("int4", torch.zeros(3), 4, "pass a module"),
        ("int4", 7, 4, "pass a module"),
        ("int4", [3.5], 4, "pass a module"),
    ],
)
def test_what_has_no_cost_is_refused_with_a_sentence(spec: str, given: nn.Module, ranks: int, remedy: str) -> None:
    with pytest.raises(gradwire.GradwireError, match=remedy):
        gradwire.cost(spec, given, ranks)
    with pytest.raises(gradwire.GradwireError, match=remedy):
        step_s(spec, given, ranks, Link(1e-3, 1e-9))


def test_the_cost_command_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    from gradwire.tasks.builtin import make_task

    assert main(["cost", "int4", "topk:0.01", "--task", "digits", "--hosts", "3"]) == 0
    said = capsys.readouterr().out
    for spec in ("int4", "topk:0.01"):
        assert f"{gradwire.cost(spec, make_task('digits', 0).model, 3, step=1_000_000).wire_bytes:,} B" in said


def test_the_cost_of_a_model_on_a_gpu_is_that_of_its_grains(capsys: pytest.CaptureFixture[str]) -> None:
    """A grain of `int4` is an all-to-all and an all-gather."""
    reducer, model = gradwire.parse("int4"), [("w", torch.zeros(3 << 20, requires_grad=True))]
    grains: list[int] = []
    collectives: list[int] = []
    for device in ("cpu", "cuda"):
        specs = specs_on(device, model)
        grains.append(len(plan(specs, reducer).units))
        collectives.append(gradwire.cost(reducer, specs, 4).collectives)
        assert main(["cost", "int4", "--task", "bytes", "--device", device]) == 0
    assert grains[1] == 3 < grains[0]
    assert collectives[0] - collectives[1] == 2 * (grains[0] - grains[1])
    *_, on_cpu, on_gpu = (int(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "int4" in line)
    assert on_gpu < on_cpu


def test_methods_may_stand_behind_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []
    for arguments in (
        ["--hosts", "8", "none", "int4"],
        ["none", "int4", "--hosts", "8"],
        ["none", "--hosts", "8", "int4"],
    ):
        assert main(["cost", *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    for arguments, remedy in {
        ("--hosts", "8"): "name at least one method",
        ("--hosts", "four", "none"): "--hosts four is no number of ranks",
        ("none", "--hosts", "-1"): "there must be at least 1",
        ("none", "--hosts", "2", "for"): "unknown method 'for'",
    }.items():
        assert main(["cost", *arguments]) == 2
        assert remedy in capsys.readouterr().err


def test_the_command_says_a_misspelt_method_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["methods", "4bit"], ["cost", "4bit"], ["compare", "--methods", "4bit"]):
        assert main(command) == 2
        assert capsys.readouterr().err == "gradwire: unknown method '4bit' in '4bit': did you mean 'int4'?\n"


def test_the_table_of_kernels_says_what_each_runs_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--kernels"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert ["block_int", "block_int_encode", "numba", "Triton"] in rows
    assert ["ternary", "ternary_encode", "numba", "torch"] in rows
    assert {row[1] for row in rows if len(row) == 4} >= {kernel.name for kernel in KERNELS}


def test_the_table_of_kernels_takes_no_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--kernels", "int4"]) != 0
    assert "give no SPEC with it" in capsys.readouterr().err


def test_help_does_not_wait_for_pytorch() -> None:
    """It is what a newcomer tries first: names of the package are loaded when they are used."""
    source = "import sys; from gradwire.cli.main import parser; parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False", "a module that the command line imports imports PyTorch"


def test_help_shows_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = re.findall(r"^  ([a-z]+) +\S", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["nothing"])
    offered = re.findall(r"[a-z]+", capsys.readouterr().err.partition("choose from")[2])
    assert len(offered) > 20
    assert sorted(shown) == sorted(offered)


@pytest.mark.parametrize("package", [gradwire, bench, doctor, simulation])
def test_every_public_name_is_there(package: ModuleType) -> None:
    assert len(package.__all__) > 5
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))


def test_what_is_known_does_not_depend_on_what_was_imported() -> None:
    source = "from gradwire.core.registry import methods, table; print(len(methods()), *table())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert {"int4", "local", "asgd", "fedavg"} <= set(done.stdout.split())
