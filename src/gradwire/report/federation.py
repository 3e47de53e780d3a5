"""The page of a federation: the metric against rounds and bytes, and what each client got."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.federate.results import FederationEvaluation, Own, Results
from gradwire.report import text
from gradwire.report.axes import NARROW, WIDE
from gradwire.report.charts import LineChart, Point, Series
from gradwire.report.template import rendered


def write_federation_report(results: Results, path: Path) -> None:
    """Write `report.html`: one file that loads nothing from anywhere."""
    write_atomically(path, render(results))


def render(results: Results) -> str:
    """The report as HTML."""
    metric, own = str(results.task["metric_name"]), _own_name(results.clients)
    return rendered(
        "federation.html",
        command="federate",
        task=results.task["name"],
        headline=headline(results),
        lede=lede(results),
        findings=[("caveat", finding) for finding in findings(results)],
        metric=metric,
        own=own,
        metric_rounds=_drawn(f"{metric} against rounds", _by_rounds(results), "rounds", "rounds"),
        metric_bytes=_drawn(f"{metric} against bytes", _by_bytes(results), "bytes", "bytes of all clients (log scale)"),
        loss_rounds=_drawn("training loss against rounds", _losses(results), "rounds", "rounds"),
        by_client=_drawn(f"{own} by client", _by_client(results.clients), "clients", "clients"),
        headings=("client", "examples", "labels", "rounds", "sent", "own loss", "own accuracy %"),
        rows=[("", _cells(client)) for client in results.clients],
        failed=[("", failure) for failure in results.failures],
        conditions=_conditions(results),
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
    about = "about " if options.get("sampling") == "poisson" else ""
    return (
        f"{results.task['description']}; {options['clients']} clients, {about}{options['sample']} a "
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
    if results.privacy is not None:
        found.append(results.privacy)
    elif results.options["aggregate"] != "mean" and results.options["update"] != "none":
        found.append(
            f"{results.options['aggregate']} leaves out what few clients agree on, which is much of compressed "
            "updates: error memory does not bring that back."
        )
    return found


def _own_name(clients: Sequence[Own]) -> str:
    return "Accuracy %" if _have_accuracy(clients) else "Loss"


def _have_accuracy(clients: Sequence[Own]) -> bool:
    return any(own.accuracy is not None for own in clients)


# --------------------------------------------------------------------------------------------- charts


def _drawn(title: str, series: list[Series], unit: str, x_title: str) -> tuple[str, str]:
    chart = LineChart(title, series, unit, x_title, nothing="There is no finite value.")
    return chart.svg(WIDE), chart.svg(NARROW)


def _point(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _by_rounds(results: Results) -> list[Series]:
    points = [_point(evaluation.rounds, evaluation.value) for evaluation in results.evaluations]
    return [Series("on held-out data", "tone0", points)]


def _by_bytes(results: Results) -> list[Series]:
    def points(column: str) -> list[Point]:
        known: list[FederationEvaluation] = [at for at in results.evaluations if getattr(at, column) >= 1]
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


def _cells(own: Own) -> list[str]:
    return [
        str(own.client),
        f"{own.examples:,}",
        text.NOTHING if own.labels is None else str(own.labels),
        str(own.rounds),
        text.si_bytes(own.sent_bytes),
        text.significant(own.loss, 3),
        text.NOTHING if own.accuracy is None else text.significant(own.accuracy, 3),
    ]


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
