"""`gradwire compare`: what it refuses, how it resumes, and one real comparison from end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import gradwire
from comparisons import Silent
from gradwire import network as net
from gradwire.cli import main as cli
from gradwire.cli.console import ConsoleView
from gradwire.compare import compare, figures, merging, run_folder, storage, torch_hooks
from gradwire.compare.options import CompareError, CompareOptions
from gradwire.compare.plan import make_plan
from gradwire.compare.results import Comparison, Evaluation, Run, Split, Wire
from gradwire.core.errors import SpecError
from gradwire.network.environment import environment
from gradwire.network.wire import WireMeter
from gradwire.ranks.news import News, read_news, write_news
from gradwire.report import write_report
from gradwire.report.page import render
from gradwire.session.automatic import CHOOSES_AFTER, EARLY_AFTER
from gradwire.tasks import builtin as tasks
from gradwire.tasks import user_tasks
from gradwire.tasks.task import Task, TaskError

TOY = """
import torch

def task(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    teacher = torch.randn(64, 4, generator=torch.Generator().manual_seed(9))
    def batch(step, rank, world_size):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, (x @ teacher).argmax(1)
    return model, batch, torch.nn.functional.cross_entropy, lambda model: 50.0

def dies():
    model, batch, loss, metric = task(0)
    def deadly(step, rank, world_size):
        if rank == 1 and step == 2:
            raise RuntimeError("the disk of rank 1 is on fire")
        return batch(step, rank, world_size)
    return model, deadly, loss, metric

def wrong():
    return 42

def leaves():
    raise SystemExit(0)

def leaves_in_its_first_step():
    model, batch, loss, metric = task(0)
    return model, (lambda step, rank, world_size: exit()), loss, metric

def made(**changes):
    from gradwire.tasks.builtin import Task
    return Task(*task(0), **changes)

def no_steps():
    return made(steps=0)

def never_evaluated():
    return made(evaluate_every=0)

def aimless():
    return made(target=float("nan"))

def clipped_to_nothing():
    return made(clip_norm=0)

def unnamed():
    return made(description=None)

def unsteady():
    return made(schedule=lambda step, progress: float("nan"))

def without_optimizer():
    return made(optimizer=list)

def in_brackets(seed):
    made_up = task(seed)
    def batch(step, rank, world_size):
        print('@gradwire {"step": 1}\\n@gradwire soon\\n@gradwire [/x]', flush=True)
        return made_up[1](step, rank, world_size)
    from gradwire.tasks.builtin import Task
    return Task(made_up[0], batch, *made_up[2:], metric_name="[/x] <b>", description="[/x] [bold] <script>")

def bursts(seed):
    model, batch, loss, metric = task(seed)
    def burst(step, rank, world_size):
        x, y = batch(step, rank, world_size)
        return x * (float("nan") if step == 5 else 1.0), y
    return model, burst, loss, metric

def gone():
    import os
    model, batch, loss, metric = task(0)
    def leave(step, rank, world_size):
        if step == 2:
            os._exit(0)
        return batch(step, rank, world_size)
    return model, leave, loss, metric

def untrainable():
    model, batch, loss, metric = task(0)
    return model, (lambda step, rank, world_size: 7), loss, metric
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "gradwire_toy.py").write_text(TOY)
    (tmp_path / "gradwire_leaves.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "gradwire_toy"


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (CompareOptions(steps=5, minutes=1), "not both"),
        (CompareOptions(hosts=0), "--hosts"),
        (CompareOptions(seeds=0), "--seeds"),
        (CompareOptions(minutes=-1), "--minutes"),
        (CompareOptions(bucket_mb=float("nan")), "--bucket-mb"),
        (CompareOptions(rate="fast"), "rate"),
        (CompareOptions(rate="9" * 400 + "mbit"), "from 1kbit to 10tbit"),
        (CompareOptions(rate="0." + "0" * 400 + "1mbit"), "from 1kbit to 10tbit"),
        (CompareOptions(steps=10**400), "--steps"),
        (CompareOptions(steps=0), "--steps"),
        (CompareOptions(seeds=10**9), "--seeds"),
        (CompareOptions(minutes=1e308), "--minutes"),
        (CompareOptions(deadline_s=float("inf")), "--deadline"),
        (CompareOptions(evaluate_every=-1), "evaluate_every"),
        (CompareOptions(target="metric:nan"), "--target"),
        (CompareOptions(methods=("int4", "int4")), "once"),
        (CompareOptions(methods=("torch.fp23",)), "torch.fp32"),
        (CompareOptions(methods=("torch.powersgd",)), "rank"),
        (CompareOptions(methods=("torch.fp32:2",)), "nothing after a colon"),
        (CompareOptions(methods=("torch.noop", "torch.noop")), "once"),
        (CompareOptions(methods=("fedavg",)), "gradwire federate --method fedavg"),
        (CompareOptions(methods=("int4,parameters=int8",)), "--engine fsdp2"),
        (CompareOptions(methods=("topq:0.01",)), "topk"),
        (CompareOptions(methods=("auto:brave",)), "bold"),
        (CompareOptions(methods=("local:H=0",)), "at least one step"),
        (CompareOptions(methods=("diloco:H=8,outer=topq:0.01",)), "topk"),
        (CompareOptions(target="method:int8", methods=("torch.fp32",)), "not among"),
        (CompareOptions(target="low"), "--target"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(options: CompareOptions, said: str):
    with pytest.raises((CompareError, SpecError, ValueError), match=re.escape(said)):
        make_plan(options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "package.module:function"),
        ("gradwire_nowhere:task", "cannot import"),
        ("gradwire_toy:absent", "no function"),
        ("gradwire_toy:wrong", "returned int"),
        ("gradwire_toy:untrainable", "first step"),
        ("gradwire_toy:leaves", "raised SystemExit"),
        ("gradwire_toy:leaves_in_its_first_step", "first step: SystemExit"),
        ("gradwire_leaves:task", "importing 'gradwire_leaves' raised SystemExit"),
        ("builtins:dict", "builtins:dict raised TypeError"),
        ("builtins:__doc__", "no function"),
        (":task", "importing ''"),
        ("gradwire_toy:no_steps", "steps is 0, and must be a whole number of at least 1"),
        ("gradwire_toy:never_evaluated", "evaluate_every is 0"),
        ("gradwire_toy:aimless", "target is nan"),
        ("gradwire_toy:clipped_to_nothing", "clip_norm is 0"),
        ("gradwire_toy:unnamed", "description is None"),
        ("gradwire_toy:unsteady", "schedule gave nan"),
        ("gradwire_toy:without_optimizer", "optimizer gave list"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(toy: str, name: str, said: str):
    with pytest.raises(TaskError, match=said):
        make_plan(CompareOptions(task=name, methods=("torch.fp32",), hosts=2))


def test_text_must_be_a_folder_with_text(tmp_path: Path):
    with pytest.raises(TaskError, match="not a folder"):
        tasks.load_corpus(tmp_path / "absent")
    with pytest.raises(TaskError, match="at least"):
        tasks.load_corpus(tmp_path)
    with pytest.raises(TaskError, match="reads no text"):
        make_plan(CompareOptions(task="digits", methods=("torch.fp32",), hosts=2, text=tmp_path))


def test_models_are_evaluated_along_the_way_where_the_target_asks_for_it():
    def every(**changes: Any) -> int:
        return make_plan(CompareOptions(task="digits", methods=("torch.fp32",), hosts=2, **changes)).evaluate_every

    assert every(steps=80) == 80
    assert every(steps=80, target="0.5") == 80
    assert every(steps=80, target="metric:90") == 10
    assert every(steps=800, target="metric:90") == tasks.digits(0).evaluate_every
    assert every(minutes=1) == tasks.digits(0).evaluate_every
    assert every(steps=80, evaluate_every=7) == 7


def test_a_link_is_timed_again_only_where_pacing_made_it_slower(monkeypatch: pytest.MonkeyPatch):
    def paced(wire: str) -> bool:
        monkeypatch.setenv("GRADWIRE_WIRE", wire)
        return WireMeter.from_environment().pace()

    assert paced("sockets:1000000")
    assert not paced("sockets:inf")
    assert not paced("interface:lo")


# ---------------------------------------------------------------------------------------------- tasks


def test_seeds_decide_weights_and_batches():
    one, same, other = (tasks.digits(seed) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in t.model.parameters()]) for t in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(one.batch(3, 1, 4)[0], same.batch(3, 1, 4)[0])
    assert not torch.equal(one.batch(3, 1, 4)[0], one.batch(3, 2, 4)[0])


def test_the_corpus_is_the_same_each_time_and_holds_no_binaries(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 2000)
    (tmp_path / "b.bin").write_bytes(bytes(30_000))
    corpus = tasks.load_corpus(tmp_path)
    assert len(corpus.train) + len(corpus.held_out) == 38_000
    assert tasks.load_corpus.__wrapped__(tmp_path).fingerprint == corpus.fingerprint


def test_byte_gpt_sees_only_what_came_before():
    model = tasks.ByteGPT(layers=1, width=16, heads=2, context=8).eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


# ------------------------------------------------------------------------------------ storing, resuming


def fake_run(method: str, seed: int) -> Run:
    wire = Wire(total=2e6, framing=1e5, payload=1.9e6)
    done = [Evaluation(3, 3.0, 90.0)]
    return Run(method, seed, "finished", "", method, [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1e6, 2e6, 3e6], done,
               wire, Split(1, 1, 1, 1, 3))  # fmt: skip


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces network and processes, so that only the order of things is left to test."""

    def stage(run_once: Callable[..., Run]) -> None:
        class Still:
            mode, description = "root", "a network that is not there"

            def __init__(self, *_: object, **__: object) -> None: ...
            def __enter__(self) -> Still:
                return self

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(compare, "Network", Still)
        monkeypatch.setattr(compare, "WarmHosts", Still)
        monkeypatch.setattr(compare, "run_once", run_once)

    return stage


def once(plan: object, network: object, warm: object, method: str, seed: int, *_: object) -> Run:
    return fake_run(method, seed)


def toy_options(tmp_path: Path, **changes: Any) -> CompareOptions:
    defaults: dict[str, Any] = {
        "task": "gradwire_toy:task",
        "methods": ("torch.fp32", "torch.fp16"),
        "hosts": 2,
        "steps": 3,
        "out": tmp_path / "out",
    }
    return CompareOptions(**(defaults | changes))


def test_seeds_are_outermost_and_finished_runs_are_not_run_again(toy: str, tmp_path: Path, staged: Callable[..., None]):
    staged(once)
    first, second = Silent(), Silent()
    compare.compare(toy_options(tmp_path, seeds=2), first)
    assert first.begun == ["torch.fp32 0", "torch.fp16 0", "torch.fp32 1", "torch.fp16 1"]
    more = toy_options(tmp_path, seeds=2, methods=("torch.fp32", "torch.bf16", "torch.fp16"))
    comparison = compare.compare(more, second)
    assert second.begun == ["torch.bf16 0", "torch.bf16 1"]
    assert comparison.methods == ["torch.fp32", "torch.bf16", "torch.fp16"]


def test_runs_made_under_other_conditions_are_neither_mixed_in_nor_lost(
    toy: str, tmp_path: Path, staged: Callable[..., None]
):
    staged(once)
    compare.compare(toy_options(tmp_path), Silent())
    with pytest.raises(CompareError, match=r"rate was '100mbit', is '1gbit'.*--fresh"):
        compare.compare(toy_options(tmp_path, rate="1gbit"), Silent())
    view = Silent()
    compare.compare(toy_options(tmp_path, rate="1gbit", fresh=True), view)
    assert len(view.begun) == 2


def test_one_failure_does_not_stop_the_others_and_is_tried_again(toy: str, tmp_path: Path, staged: Callable[..., None]):
    def fails(plan: object, network: object, warm: object, method: str, seed: int, *_: object) -> Run:
        bad = Run(method, seed, status="failed", reason="rank 1 was killed by SIGKILL")
        return bad if method == "torch.fp32" else fake_run(method, seed)

    staged(fails)
    comparison = compare.compare(toy_options(tmp_path), Silent())
    assert [run.status for run in comparison.runs] == ["failed", "finished"]
    view = Silent()
    compare.compare(toy_options(tmp_path), view)
    assert view.begun == ["torch.fp32 0"]


def test_an_interrupt_keeps_what_is_finished(
    toy: str, tmp_path: Path, staged: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    def interrupted(plan: object, network: object, warm: object, method: str, seed: int, *_: object) -> Run:
        if method == "torch.fp16":
            raise KeyboardInterrupt
        return fake_run(method, seed)

    staged(interrupted)
    out = tmp_path / "out"
    argv = ["compare", "--task", "gradwire_toy:task", "--methods", "torch.fp32", "torch.fp16"]
    assert cli.main([*argv, "--steps", "3", "--out", str(out)]) == 130
    assert "the same command" in capsys.readouterr().out
    assert [path.name for path in (out / "runs").glob("*.json")] == ["torch_fp32-seed0.json"]


def test_a_folder_that_cannot_be_written_is_one_sentence(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("in the way")
    argv = ["compare", "--task", "gradwire_toy:task", "--methods", "torch.fp32", "--steps", "1"]
    assert cli.main([*argv, "--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "file" in said


def test_misuse_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["compare", "--methods", "torch.fp23"]) == 2
    assert capsys.readouterr().err == (
        "gradwire: unknown method 'torch.fp23' in 'torch.fp23': did you mean 'torch.fp32'?\n"
    )


# ------------------------------------------------------------------------------------------ predictions


def test_what_pytorchs_methods_send_is_predicted():
    model = torch.nn.Linear(100, 50)
    dense = 4 * 5050 * 1.5
    predicted = {
        spec: torch_hooks.predicted_bytes(gradwire.parse(spec), model, 5, 4)
        for spec in ("torch.fp32", "torch.fp16", "torch.noop", "torch.powersgd:4")
    }
    factors = 4 * (150 * 4 + 50) * 1.5
    assert predicted == {
        "torch.fp32": dense, "torch.fp16": dense / 2, "torch.noop": 0, "torch.powersgd:4": factors,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- report


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def fake_comparison(*runs: Run) -> Comparison:
    plan = SimpleNamespace(mode="root", description="four hosts <joined>")
    return Comparison(
        task={"name": "toy", "description": "a <toy>", "metric_name": "score", "higher_is_better": True},
        options={"hosts": 4, "rate": "100mbit", "steps": 3, "minutes": None, "bucket_mb": 25.0},
        environment=environment(plan),  # pyright: ignore[reportArgumentType]
        smoothing=1,
        target=None,
        runs=list(runs),
    )


def test_the_report_is_one_well_formed_file_that_loads_nothing(tmp_path: Path):
    dead = Run("sign", 0, status="failed", reason="rank 1 said <ouch>")
    comparison = fake_comparison(
        fake_run("torch.fp32", 0), fake_run("torch.noop", 0), *(fake_run("int4", s) for s in range(3)), dead
    )
    write_report(comparison, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    parser = References()
    parser.feed(page)
    assert parser.open == []
    assert parser.found == []
    assert "http" not in page.lower().replace("http-equiv", "")
    assert "rank 1 said &lt;ouch&gt;" in page
    assert "url(#clip" in page


def test_a_report_of_nothing_but_failures_can_be_written():
    assert "killed" in render(fake_comparison(Run("int4", 0, status="failed", reason="rank 0 was killed")))


# ----------------------------------------------------------------------------------------- end to end


def test_a_comparison_from_end_to_end(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    argv = ["compare", "--task", "gradwire_toy:task", "--hosts", "2", "--steps", "8", "--network", "paced"]
    ours = ["int4", "local:H=3,outer=int4", "demo:0.5", "gossip:ring", "ssp:1", "hogwild"]
    methods = ["torch.fp32", "torch.powersgd:1", "torch.noop", *ours]
    assert cli.main([*argv, "--methods", *methods, "--out", str(out)]) == 0
    comparison = storage.load(out / "results.json")
    fp32, powersgd, noop, int4, local, demo, gossip, ssp, hogwild = figures.summarise(comparison)
    thrice = int4.wire.payload * 3 / 8  # twice in eight steps, and once more in the end, which ranks agree on
    assert abs(local.wire.payload - thrice) < 4
    for row in (fp32, powersgd, int4, local, demo, gossip, ssp):
        assert row.bytes_per_step is not None
        assert row.wire.surprise is not None
        assert abs(row.wire.payload - row.wire.total + row.wire.framing) < 2000
    assert fp32.bytes_per_step is not None
    assert noop.bytes_per_step is not None
    assert noop.bytes_per_step < 0.1 * fp32.bytes_per_step
    assert hogwild.wire.payload == 0
    assert comparison.finished("ssp:1")[0].steps == 8
    assert [evaluation.steps for evaluation in comparison.finished("ssp:1")[0].evaluations][-1] == 8
    assert (out / "report.html").exists()
    assert not list((out / "logs").rglob("rendezvous*"))
    kept = comparison.finished("int4")[0].report
    assert kept is not None
    assert kept["sent_bytes"] * 8 == comparison.finished("int4")[0].wire.payload * 1.0
    assert comparison.finished("torch.fp32")[0].report is None
    assert f"session.report(): {kept['verdict']}" in capsys.readouterr().out
    assert cli.main(["report", str(out)]) == 0
    assert "torch.powersgd:1" in capsys.readouterr().out


@pytest.mark.one_draw_in(3)
def test_auto_is_compared_and_its_row_says_what_it_chose(toy: str, tmp_path: Path):
    out = tmp_path / "out"
    argv = ["compare", "--task", "gradwire_toy:task", "--hosts", "2", "--steps", "14", "--network", "paced"]
    assert cli.main([*argv, "--methods", "torch.fp32", "auto:lossless", "--out", str(out)]) == 0
    comparison = storage.load(out / "results.json")
    (dense,), (run,) = (comparison.finished(method) for method in ("torch.fp32", "auto:lossless"))
    assert run.label in {f"none from step {step}" for step in (EARLY_AFTER, CHOOSES_AFTER)}  # times decide which
    assert run.report is not None
    assert run.report["chosen"].startswith(f"auto:lossless took {run.label} on")
    assert run.wire.payload == pytest.approx(dense.wire.payload, rel=1e-3)
    assert run.wire.other > dense.wire.other  # what was sent to measure the link is counted at the interface


@pytest.mark.turns("bad runs", 1)
def test_a_rank_that_dies_is_named_with_its_last_lines(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["compare", "--task", "gradwire_toy:dies", "--hosts", "2", "--steps", "8", "--network", "paced"]
    assert cli.main([*argv, "--methods", "torch.fp32", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "rank 1 ended with status 1" in said
    assert "the disk of rank 1 is on fire" in said
    stored = json.loads((tmp_path / "out" / "runs" / "torch_fp32-seed0.json").read_text())
    assert stored["status"] == "failed"


def test_a_user_task_may_be_a_task(toy: str):
    made = user_tasks.as_task(user_tasks.call_user_task("gradwire_toy:task", 0), "toy")
    assert isinstance(made, Task)


# --------------------------------------------------------------------------------- what a task may do


def test_news_are_told_from_what_a_task_prints():
    news = News(3, float("inf"), 0.5, 800.0)
    assert read_news(write_news(news, "f00d"), "f00d", News) == news
    for line in ("", "@gradwire", "@gradwire {}", write_news(news, "beef"), "@gradwire f00d", "@gradwire f00d [1, 2]"):
        assert read_news(line, "f00d", News) is None
    for text in ("{}", "[]", "[1, 2, 3, {}]", "[null, 1, 1, 1]", "[1e999, 1, 1, 1]", '"four"', "7"):
        assert read_news(f"@gradwire f00d {text}", "f00d", News) is None


@pytest.mark.turns("bad runs", 1)
def test_names_are_shown_as_they_are_and_output_that_looks_like_news_is_none(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", "--task", "gradwire_toy:in_brackets", "--hosts", "1", "--steps", "3", "--network", "paced"]
    assert cli.main([*argv, "--methods", "torch.fp32", "--out", str(tmp_path / "[/x]")]) == 0
    said = capsys.readouterr().out
    assert ": [/x] [bold] <script>\n" in said
    assert "final [/x] <b>" in said
    assert "No conclusion: there is only one host" in said
    page = (tmp_path / "[/x]" / "report.html").read_text()
    assert "[/x] [bold] &lt;script&gt;" in page


def test_a_bar_shows_names_as_they_are():
    console = Console(file=StringIO(), force_terminal=True, width=120)
    bar = ConsoleView(console)
    bar.begin(make_plan(CompareOptions(task="digits", methods=("torch.fp32",), hosts=2)), "a network [/x]", [])
    bar.news("[/x]", 0, News(1, 2.0, 0.1, 5.0))
    bar.close()
    assert "[/x]" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.turns("bad runs", 1)
def test_a_loss_that_is_no_number_ends_with_a_cross_and_a_status_of_its_own(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", "--task", "gradwire_toy:bursts", "--hosts", "2", "--steps", "8", "--network", "paced"]
    out = tmp_path / "out"
    assert cli.main([*argv, "--methods", "torch.fp32", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "✗ torch.fp32 seed 0: the loss is not finite from step 6 on" in said
    assert "✓" not in said
    assert json.loads((out / "verdict.json").read_text())["alarm"] is True


@pytest.mark.turns("bad runs", 1)
def test_a_task_that_ends_the_process_is_a_failed_run(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["compare", "--task", "gradwire_toy:gone", "--hosts", "1", "--steps", "8", "--network", "paced"]
    assert cli.main([*argv, "--methods", "torch.fp32", "--out", str(tmp_path / "out")]) == 1
    assert "rank 0 ended with status 0, but before it had finished" in capsys.readouterr().out


def test_ranks_whose_losses_cancel_have_no_mean_and_no_exception():
    rank = {
        "label": "", "losses": [float("inf")], "times_s": [1.0], "tx_bytes": [1], "evaluations": [[1, 1.0, 2.0]],
        "metric_values": [], "residual_norm": None, "report": None, "apart": False, "timed_steps": None,
        "samples": 0, "energy_j": None,
    }  # fmt: skip
    zeros = dict.fromkeys(
        (
            "total",
            "framing",
            "payload",
            "buffers",
            "setup",
            "between",
            "compute_s",
            "encode_s",
            "wait_s",
            "codec_cpu_s",
            "cpu_s",
        ),
        0,
    )
    merged = merging.merge("int4", 0, [rank | zeros, rank | zeros | {"losses": [float("-inf")]}])
    assert merged.losses[0] != merged.losses[0]


def test_a_run_file_that_is_damaged_is_made_again(tmp_path: Path):
    run_folder.prepare_folder(tmp_path, fresh=False)
    run_folder.store_run(tmp_path, fake_run("int4", 0))
    assert run_folder.read_run(tmp_path / "runs" / "int4-seed0.json") == fake_run("int4", 0)
    for damage in (b"", b"\xff\x00", b"[]", b'{"method": 3}', b"[" * 99_999):
        (tmp_path / "runs" / "int4-seed0.json").write_bytes(damage)
        assert run_folder.stored_runs(tmp_path, [("int4", 0)], lambda method: {}) == []


# ------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("rate", ["9" * 400 + "bit", "11tbit", "999bit", "1e9mbit", "nanmbit", "-1mbit", ""])
def test_absurd_rates_are_refused(rate: str):
    with pytest.raises(ValueError, match="from 1kbit to 10tbit") as refused:
        net.parse_rate(rate)
    assert len(str(refused.value)) < 200
    assert net.parse_rate("10tbit") == 1e13


def test_a_latency_without_a_rate_is_refused(toy: str, capsys: pytest.CaptureFixture[str]):
    cost = ["cost", "int4", "--task", "gradwire_toy:task"]
    assert cli.main([*cost, "--latency", "5"]) == 2
    assert "--latency tells nothing without --rate" in capsys.readouterr().err
    assert cli.main([*cost, "--latency", "5", "--hosts", "4", "8"]) == 2
    assert cli.main([*cost, "--latency", "5", "--rate", "100mbit"]) == 0
    assert cli.main([*cost, "--rate", "9" * 400 + "mbit"]) == 2
