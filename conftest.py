"""`--cases drawn` runs part of each product of parameters (`tools/drawing.py`), `--seed` repeats a draw."""

from __future__ import annotations

from collections import defaultdict

import pytest

from drawing import always, covering, seed_of_commit, some


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", choices=("all", "drawn"), default="all", help="the whole product, or a draw of it")
    parser.addoption("--seed", type=int, help="of the draw; that of the commit where it is left out")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cases == "drawn":
        if config.option.seed is None:
            config.option.seed = seed_of_commit(config.rootpath)
        config.option.hypothesis_seed = str(config.option.seed)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.cases == "all":
        return None
    return f"cases: drawn with --seed {config.option.seed} (make test-all runs all)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.cases == "all":
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept, known = set[str](), always()
    for name, cases in tests.items():
        kept |= {item.nodeid for item in _drawn(cases, f"{config.option.seed} {name}")}
    kept |= known & {item.nodeid for item in items}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _drawn(cases: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The cases of one test that run."""
    cases = [item for item in cases if item.get_closest_marker("long") is None]
    marker = cases[0].get_closest_marker("draw") if cases else None
    # pytest's own `indices` number the cases and not the values, which all cases share as objects
    specs = [vars(item).get("callspec") for item in cases]
    values = [{name: id(value) for name, value in spec.params.items()} if spec else {} for spec in specs]
    if marker is not None:
        return [cases[place] for place in some(values, marker.args[0], seed)]
    if values and len(values[0]) > 1:
        return [cases[place] for place in covering(values, seed)]
    return cases
