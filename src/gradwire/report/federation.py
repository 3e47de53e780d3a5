"""The page of a federation: the metric against rounds and bytes, and what each client got."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from gradwire.bench.federation_results import Evaluation, Own, Results
from gradwire.bench.storage import write_atomically
from gradwire.report import text
from gradwire.report.axes import NARROW, WIDE
from gradwire.report.charts import LineChart, Point, Series
from gradwire.report.page import definitions, framed, html_table


def write_federation_report(results: Results, path: Path) -> None:
    """Write `report.html`: one file that loads nothing from anywhere."""
    write_atomically(path, render(results))


def render(results: Results) -> str:
    """The report as HTML."""
    metric = str(results.task["metric_name"])
    return framed(
        "federate",
        str(results.task["name"]),
        "federation.html",
        headline=html.escape(headline(results)),
        lede=html.escape(lede(results)),
        findings=_findings(results),
        metric=html.escape(metric[:1].upper() + metric[1:]),
        own=html.escape(_own_name(results.clients)),
        metric_rounds=_drawn(f"{metric} against rounds", _by_rounds(results), "rounds", "rounds"),
        metric_bytes=_drawn(f"{metric} against bytes", _by_bytes(results), "bytes", "bytes of all clients (log scale)"),
        loss_rounds=_drawn("training loss against rounds", _losses(results), "rounds", "rounds"),
        by_client=_drawn(f"{_own_name(results.clients)} by client", _by_client(results.clients), "clients", "clients"),
        table=_table(results.clients),
        failures=_failures(results.failures),
        conditions=definitions(_conditions(results)),
    )


# ---------------------------------------------------------------------------------------------- words


def headline(results: Results) -> str:
    """What the run came to."""
    last = results.evaluations[-1]
    sent = text.si_bytes(last.sent_bytes)
    return (
        f"{results.task['metric_name']}: {text.significant(last.value, 4)} after {text.counted(last.rounds, 'round')}, "
        f"with {sent} from clients to the server"
    )


def lede(results: Results) -> str:
    """What was done, in one sentence."""
    options = results.options
    return (
        f"{results.task['description']}; {options['clients']} clients, {options['sample']} a "
        f"round, partition {options['partition']}, method {options['method']}, updates {options['update']}, aggregate "
        f"{options['aggregate']}."
    )


def findings(results: Results) -> list[str]:
    """What a reader should know beside the figures."""
    found: list[str] = []
    sent = sum(len(done.clients) for done in results.rounds)
    dropped = sum(len(done.dropped) for done in results.rounds)
    if dropped:
        found.append(f"{dropped} of {dropped + sent} clients that were drawn sent nothing that counted.")
    if results.failures:
        found.append(f"{text.counted(len(results.failures), 'round')} had to be drawn anew: {results.failures[0]}")
    if results.options["aggregate"] != "mean" and results.options["update"] != "none":
        found.append(
            f"{results.options['aggregate']} leaves out what few clients agree on, which is much of compressed "
            "updates: error memory does not bring that back."
        )
    return found


def _findings(results: Results) -> str:
    items = "".join(f'<li class="caveat">{html.escape(finding)}</li>' for finding in findings(results))
    return f'<ul class="findings">{items}</ul>' if items else ""


def _own_name(clients: Sequence[Own]) -> str:
    return "Accuracy %" if _have_accuracy(clients) else "Loss"


def _have_accuracy(clients: Sequence[Own]) -> bool:
    return any(own.accuracy is not None for own in clients)


# --------------------------------------------------------------------------------------------- charts


def _drawn(title: str, series: list[Series], unit: str, x_title: str) -> str:
    chart = LineChart(title, series, unit, x_title, nothing="There is no finite value.")
    return f'<div class="wide">{chart.svg(WIDE)}</div><div class="narrow">{chart.svg(NARROW)}</div>'


def _point(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _by_rounds(results: Results) -> list[Series]:
    points = [_point(evaluation.rounds, evaluation.value) for evaluation in results.evaluations]
    return [Series("on held-out data", "tone0", points)]


def _by_bytes(results: Results) -> list[Series]:
    def points(column: str) -> list[Point]:
        known: list[Evaluation] = [at for at in results.evaluations if getattr(at, column) >= 1]
        return [_point(getattr(at, column), at.value) for at in known]

    return [Series("sent", "tone0", points("sent_bytes")), Series("received", "tone1", points("received_bytes"))]


def _losses(results: Results) -> list[Series]:
    return [Series("loss", "tone2", [_point(done.number + 1, done.loss) for done in results.rounds])]


def _by_client(clients: Sequence[Own]) -> list[Series]:
    if _have_accuracy(clients):
        values = sorted(own.accuracy for own in clients if own.accuracy is not None)
    else:
        values = sorted((own.loss for own in clients), reverse=True)
    return [Series("final model", "tone3", [_point(i + 1, value) for i, value in enumerate(values)])]


# --------------------------------------------------------------------------------------------- tables


def _table(clients: Sequence[Own]) -> str:
    names = ["client", "examples", "labels", "rounds", "sent", "own loss", "own accuracy %"]
    body = [
        (
            [
                str(own.client),
                f"{own.examples:,}",
                text.NOTHING if own.labels is None else str(own.labels),
                str(own.rounds),
                text.si_bytes(own.sent_bytes),
                text.significant(own.loss, 3),
                text.NOTHING if own.accuracy is None else text.significant(own.accuracy, 3),
            ],
            "",
        )
        for own in clients
    ]
    return html_table(names, body)


def _failures(failures: Sequence[str]) -> str:
    if not failures:
        return ""
    items = "".join(f"<pre>{html.escape(failure)}</pre>" for failure in failures)
    return f'<section class="failures"><h2>Rounds drawn anew</h2>{items}</section>'


def _conditions(results: Results) -> list[tuple[str, str]]:
    options, environment = results.options, results.environment
    local = (
        f"SGD with lr {options['lr']:g} and momentum {options['momentum']:g}, {options['epochs']} epochs in batches of "
    )
    local += f"{options['batch']}"
    trouble = f"clients lost with probability {options['drop']:g}, slow with probability {options['slow']:g}; quorum "
    return [
        ("local steps", local),
        ("sent", f"updates {options['update']}, broadcast {options['broadcast']}; nothing is framed or encrypted here"),
        ("trouble", trouble + str(options["quorum"])),
        ("seed", str(options["seed"])),
        ("engine", f"one process, one thread, clients one after another, {text.seconds(results.seconds)} in all"),
        ("processor", str(environment["processor"])),
        ("software", f"gradwire {environment['gradwire']}, PyTorch {environment['torch']}, Python "
         f"{environment['python']}, {environment['system']}"),
        ("made", f"{environment['created']} by {environment['command']}"),
    ]  # fmt: skip
