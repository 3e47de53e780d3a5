"""`--cases drawn` runs part of each product of parameters (`tools/drawing.py`), `--seed` repeats a draw."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drawing import always, covering, one_in, seed_of_commit, some


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", choices=("all", "drawn"), default="all", help="the whole product, or a draw of it")
    parser.addoption("--seed", type=int, help="of the draw; that of the commit where it is left out")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cases == "drawn":
        if config.option.seed is None:
            config.option.seed = seed_of_commit(config.rootpath)
        config.option.hypothesis_seed = str(config.option.seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of the package without examples: each process of tests would import them, and with some of
    them whole frameworks."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath / "src"):
        return None
    return None if ">>>" in collection_path.read_text(encoding="utf-8") else True


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.cases == "all":
        return None
    return f"cases: drawn with --seed {config.option.seed} (make test-all runs all)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.cases == "all":
        return
    seed, tests = config.option.seed, defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    one, turns = _OneValue(seed, items), _left_out(seed, items)
    kept = always().intersection(item.nodeid for item in items)
    for name, cases in tests.items():
        if name in turns:
            continue
        kept |= {item.nodeid for item in _drawn([item for item in cases if one.has(item)], f"{seed} {name}")}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _drawn(cases: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The cases of one test that run."""
    cases = [item for item in cases if item.get_closest_marker("long") is None]
    marker = cases[0].get_closest_marker("draw") if cases else None
    if marker is not None:
        return [cases[place] for place in some(cases, marker.args[0], seed)]
    # pytest's own `indices` number the cases and not the values, which all cases share as objects
    values = [{name: id(value) for name, value in parameters(item).items()} for item in cases]
    if values and len(values[0]) > 1:
        return [cases[place] for place in covering(values, seed)]
    return cases


def _left_out(seed: int, items: list[pytest.Item]) -> set[str]:
    """Tests whose turn it is not.

    Of those in a file with the marker `turns` of one name, as many run as it says. One with `one_draw_in(3)` runs with
    one seed of three, whatever else is collected.
    """
    groups: dict[tuple[Path, str, int], dict[str, None]] = defaultdict(dict)
    left_out: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if (marker := item.get_closest_marker("turns")) and item.get_closest_marker("long") is None:
            groups[item.path, *marker.args][name] = None
        if (marker := item.get_closest_marker("one_draw_in")) and not one_in(marker.args[0], f"{seed} {name}"):
            left_out.add(name)
    for (path, name, count), found in groups.items():
        tests = list(found)
        left_out.update(tests)
        left_out.difference_update(tests[place] for place in some(tests, count, f"{seed} {path.name} {name}"))
    return left_out


class _OneValue:
    """What the marker `one_of` leaves of each file: one value of the parameter that it names."""

    def __init__(self, seed: int, items: list[pytest.Item]) -> None:
        values: dict[tuple[Path, str], list[Any]] = defaultdict(list)
        for item in items:
            if (marker := item.get_closest_marker("one_of")) and marker.args[0] in (given := parameters(item)):
                values[item.path, marker.args[0]].append(given[marker.args[0]])
        draw = random.Random(f"{seed} one_of")
        self._kept = {place: draw.choice(list(dict.fromkeys(found))) for place, found in values.items()}

    def has(self, item: pytest.Item) -> bool:
        marker = item.get_closest_marker("one_of")
        given = parameters(item)
        if marker is None or marker.args[0] not in given:
            return True
        return given[marker.args[0]] == self._kept[item.path, marker.args[0]]


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """The parameters of a case, by name."""
    spec = vars(item).get("callspec")
    return spec.params if spec else {}


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """The parameters of the cases that run in this file: for set-ups that serve many cases at once."""
    return [parameters(item) for item in request.session.items if item.path == request.path]


@pytest.fixture
def siblings(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """The parameters of the cases of this test that run, its own among them."""
    own = request.node
    names = (item for item in request.session.items if item.path == own.path)
    return [parameters(item) for item in names if vars(item).get("originalname") == own.originalname]
