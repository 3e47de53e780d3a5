"""`gradwire federate`: a small federation from end to end, and what it refuses."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli import main as cli
from gradwire.core.errors import CompositionError, FederationError, SpecError
from gradwire.federate import federation as federate
from gradwire.federate import results as federation_results
from gradwire.federate.federation import FederationRun
from gradwire.federate.options import FederateOptions
from gradwire.federated.names import parse_method, parse_partition
from gradwire.reducers.aggregate import epsilon
from gradwire.report.federation import findings, render
from gradwire.tasks.task import TaskError

SMALL = ["--clients", "12", "--sample", "4", "--epochs", "1", "--batch", "30"]


def test_the_command_trains_and_leaves_results_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = ["--method", "fedprox:0.1+fedavgm:0.5", "--update", "topk:0.05", "--aggregate", "trimmed:1"]
    given = ["federate", *SMALL, *method, "--rounds", "3", "--drop", "0.2", "--out", str(tmp_path)]
    assert cli.main(given) == 0
    printed = capsys.readouterr().out
    assert "round 1 of 3" in printed
    assert "accuracy %" in printed
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert results["kind"] == "federation"
    assert [done["number"] for done in results["rounds"]] == [0, 1, 2]
    assert [at["rounds"] for at in results["evaluations"]] == [0, 1, 2, 3]
    assert results["evaluations"][-1]["sent_bytes"] == sum(
        sent for done in results["rounds"] for sent in done["sent_bytes"].values()
    )
    assert sum(own["examples"] for own in results["clients"]) == 1438
    for own in results["clients"]:
        took_part = [done for done in results["rounds"] if str(own["client"]) in done["sent_bytes"]]
        assert own["rounds"] == len(took_part)
    page = (tmp_path / "report.html").read_text()
    HTMLParser().feed(page)
    assert page.count('class="chart"') == 8  # four, each wide and narrow
    assert "fedprox:0.1+fedavgm:0.5" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_page_can_be_made_again_of_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["federate", "--clients", "6", "--sample", "3", "--rounds", "2", "--epochs", "1", "--drop", "0.3"]
    assert cli.main([*argv, "--out", str(tmp_path)]) == 0
    page, results = (tmp_path / "report.html").read_text(), federation_results.load(tmp_path / "results.json")
    said = capsys.readouterr().out
    (tmp_path / "report.html").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == page
    assert said.endswith(capsys.readouterr().out)
    federation_results.save(results, tmp_path / "again.json")
    assert federation_results.load(tmp_path / "again.json") == results


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 3}, "results.rounds should be a list"),
        ({"schema": 9}, "newer than 1: update gradwire"),
        ({"evaluations": []}, "evaluations is empty"),
        ({"clients": [{"client": 0}]}, "has no 'examples'"),
    ],
)
def test_results_that_are_none_are_one_sentence(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation_results.save(
        FederationRun(FederateOptions(clients=3, sample=1, out=tmp_path)).results, tmp_path / "results.json"
    )
    data = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps(data | change))
    assert cli.main(["report", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--sample", "200"], "larger than the federation of 12"),
        (["--clients", "0"], "--clients must be at least 1, and at most 1,000,000,000, not 0"),
        (["--clients", "1439", "--sample", "4"], "1438 examples for 1439 clients"),
        (["--partition", "dirichlet:x"], "alpha='x' in 'dirichlet:x': expected a number"),
        (["--partition", "dirichelt"], "did you mean 'dirichlet'"),
        (["--method", "fedavg+fedprox"], "two of one kind"),
        (["--method", "fedadam:0.1,rate=2"], "'fedadam' has no option 'rate'"),
        (["--method", "fedavg:1"], "'fedavg' takes nothing after a colon"),
        (["--update", "powersgd:2"], "no codec"),
        (["--aggregate", "krum:2"], "needs 7 clients a round"),
        (["--drop", "2"], "a probability"),
        (["--quorum", "9"], "quorum of 9 among 4"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["federate", *SMALL, *given, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_federation_that_never_comes_together_fails_and_says_why(tmp_path: Path) -> None:
    run = federate.FederationRun(FederateOptions(clients=12, sample=4, epochs=1, rounds=2, drop=1.0, out=tmp_path))
    with pytest.raises(FederationError, match="has 0 updates of 4 clients"):
        run.train(lambda news: None)
    results = run.finish()
    assert len(results.failures) == federate.MOST_FAILURES
    assert any("drawn anew" in finding for finding in findings(results))
    assert "Rounds drawn anew" in render(results)


def test_tasks_that_cannot_be_dealt_out_are_refused() -> None:
    from gradwire.tasks.builtin import digits

    task = digits(0)
    with pytest.raises(TaskError, match="examples="):
        federate.examples_of(type(task)(task.model, task.batch, task.loss, task.metric), "mine:task")


@pytest.mark.parametrize("text", ["fednowa", "fedavg+", "fedprox:a", "scaffold+scaffold", "mean+fedadam"])
def test_methods_that_there_are_not_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_method(text)


def test_numbers_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(CompositionError, match="mu=-1"):
        parse_method("fedprox:-1")
    with pytest.raises(CompositionError, match="alpha=0"):
        parse_partition("quantity:0")
    with pytest.raises(SpecError, match="a whole number"):
        parse_partition("shards:1.5")


def test_a_private_federation_tells_its_epsilon_and_goes_on_without_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One client is expected in a round, so about a third of the rounds are empty."""
    given = ["--clients", "12", "--sample", "1", "--epochs", "1", "--batch", "60", "--rounds", "12", "--quorum", "0"]
    private = ["--sampling", "poisson", "--aggregate", "dp:0.1,noise=0.5", "--delta", "0.001", "--seed", "2"]
    assert cli.main(["federate", *given, *private, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    results = federation_results.load(tmp_path / "results.json")
    want = epsilon(0.5, 12, 0.001, 1 / 12)
    sentence = f"After 12 rounds epsilon is {want:.3g} at delta 0.001, for adding or removing one client."
    assert results.privacy is not None
    assert results.privacy.startswith(sentence)
    assert sentence in " ".join(said.split())
    assert sentence in (tmp_path / "report.html").read_text()
    assert "about 1 a round" in " ".join((tmp_path / "report.html").read_text().split())
    numbers = {len(done.clients) for done in results.rounds}
    assert len(results.rounds) == 12
    assert len(numbers) > 1
    assert all(math.isnan(done.loss) == (not done.clients) for done in results.rounds)
    data = json.loads((tmp_path / "results.json").read_text())
    del data["privacy"]  # as results were before there was such a sentence
    (tmp_path / "results.json").write_text(json.dumps(data))
    assert federation_results.load(tmp_path / "results.json").privacy is None


def test_without_a_private_mean_nothing_is_said_of_privacy() -> None:
    run = FederationRun(FederateOptions(clients=12, sample=4, rounds=1, epochs=1, batch=30))
    assert run.simulation.server.quorum == run.results.options["quorum"] == 1
    assert run.finish().privacy is None
    fixed = FederationRun(FederateOptions(clients=12, sample=4, rounds=1, epochs=1, batch=30, aggregate="dp:1"))
    assert "for replacing one client by another" in str(fixed.finish().privacy)


def test_a_poisson_sample_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(CompositionError, match="a sample of 13 clients is larger than the federation of 12"):
        FederationRun(FederateOptions(clients=12, sample=13, sampling="poisson"))
    with pytest.raises(CompositionError, match="a quorum of 2 with a private mean"):
        FederationRun(FederateOptions(clients=12, sample=4, aggregate="dp:1", quorum=2))
