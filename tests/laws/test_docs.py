"""The docs are true: the codec that `docs/extending.md` shows passes the laws, and the specs of pages can be built."""

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import gradwire
import methods_page
from gradwire import hooks
from gradwire.codecs import Codec
from gradwire.core import registry
from gradwire.core.grain import flat_grain
from gradwire.core.key import Key
from gradwire.core.registry import Method

from . import checks
from .subjects import sample

ROOT = Path(__file__).parents[2]


def code_blocks(path: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> type[Codec]:
    """The codec of the page, registered by the page's own line."""
    source, line, *_ = code_blocks("docs/extending.md")
    module = types.ModuleType("bare_sign")
    monkeypatch.setitem(sys.modules, "bare_sign", module)
    exec(source, vars(module))
    monkeypatch.setattr(registry, "_methods", dict(registry.methods()))
    exec(line, {"register": registry.register, "Method": Method, **vars(module)})
    found: type[Codec] = vars(module)["BareSign"]
    return found


def test_the_codec_of_the_page_passes_the_laws(shown: type[Codec]) -> None:
    codec, x, key = shown(), sample("normal", (257,), seed=1), Key(seed=1)
    checks.check_preserved(codec, x, key)
    checks.check_payload_bytes(codec, x, key)
    checks.check_accumulate(codec, x, key)
    checks.check_cut(codec, x, key)


def test_its_line_makes_it_a_method(shown: type[Codec]) -> None:
    reducer = gradwire.parse("baresign:0.02")
    assert "BareSign(step=0.02)" in repr(reducer)
    ranks = gradwire.Lockstep(reducer, flat_grain(100), world_size=3)
    means = ranks.step([torch.ones(100), torch.ones(100), -torch.ones(100)])
    assert all(torch.equal(mean, means[0]) for mean in means)
    with pytest.raises(gradwire.CompositionError, match="no contraction"):
        gradwire.parse("baresign,ef=on")
    with pytest.raises(gradwire.CompositionError, match="TwoShot"):
        gradwire.parse("baresign,exchange=allreduce")


def test_examples_of_federations_run() -> None:
    names: dict[str, object] = {}
    for block in code_blocks("docs/federated.md"):
        exec(block, names)


@pytest.mark.parametrize("block", code_blocks("docs/parts.md"), ids=lambda block: block.strip().splitlines()[-1])
def test_examples_of_parts_run(block: str) -> None:
    exec(block, {})


def test_every_spec_of_the_page_can_be_built() -> None:
    """Those of its table are in `tests/test_catalogue.py`."""
    text = (ROOT / "docs" / "specs.md").read_text()
    options = text[text.index("Options follow commas") : text.index("In Python the parts compose directly")]
    specs = [spec for spec in re.findall(r"`([^`]+)`", options) if spec[0].isalpha()]
    assert len(specs) >= 10
    for spec in specs:
        gradwire.parse(spec)


def check_link(link: str, page: Path) -> None:
    """A link of a page leads to a file or folder, and to a heading if it names one."""
    path, _, address = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.exists(), link
    assert not address or address in map(methods_page.anchor, methods_page.headings(target)), link


def test_links_of_the_readme_work_away_from_the_repository() -> None:
    """A package index shows the page elsewhere, where relative links lead nowhere."""
    home = "https://github.com/gradwire/gradwire/blob/main/"
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 7
    for link in links:
        assert link.startswith(home), link
        check_link(link.removeprefix(home).removesuffix("?raw=true"), ROOT / "README.md")  # raw: as pictures are shown


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_links_between_pages_lead_to_what_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            check_link(link, page)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "building").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_figures_name_the_run_that_made_them(page: Path) -> None:
    """In the section that a table is in: a file or script of benchmarks, a command, a test, or the page of results."""
    source = r"benchmarks/\w|results\.md|[`\n]gradwire \w+ |`make compare`|tests/\w+\.py"
    sections = re.split(r"(?m)^(?=##+ )", page.read_text())
    tables = [section for section in sections if re.search(r"\|\s*-+:\s*\|", section)]
    assert [section.splitlines()[0] for section in tables if not re.search(source, section)] == []


def test_the_index_lists_every_page() -> None:
    docs = ROOT / "docs"
    listed = {(docs / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", (docs / "README.md").read_text())}
    pages = {page.resolve() for folder in (docs, docs / "building") for page in folder.glob("*.md")} - {
        docs / "README.md"
    }
    assert pages - listed == set()


def test_there_are_tables_of_figures() -> None:
    assert sum(bool(re.search(r"\|\s*-+:\s*\|", page.read_text())) for page in PAGES) > 8


def test_files_of_benchmarks_that_are_named_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {name.rstrip(".") for page in pages for name in re.findall(r"benchmarks/[\w./*-]+", page.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(ROOT.glob(name))] == []


def test_the_log_lists_its_pages() -> None:
    listed = re.findall(r"\]\(log/(\w+)\.md\)", (ROOT / "docs" / "building" / "log.md").read_text())
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs" / "building" / "log").glob("*.md"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "building" / "log").glob("*.md")), ids=lambda page: page.stem)
def test_each_finding_of_the_log_has_a_date_and_begins_with_its_conclusion(page: Path) -> None:
    findings = re.findall(r"^##+ (.*)\n\n(.*)", page.read_text(), re.MULTILINE)
    findings = [(title, first) for title, first in findings if not first.startswith("#")]
    assert findings
    for title, first in findings:
        assert re.search(r"\(\d{4}-\d\d-\d\d(, \d{4}-\d\d-\d\d)*\)$", title), title
        assert first.startswith("**"), title


@pytest.mark.parametrize("path", ["docs/hooks.md", "src/gradwire/hooks.py"])
def test_the_power_sgd_example_compresses_from_the_first_step(path: str) -> None:
    calls = re.findall(r"^(?!-).*(PowerSGDState\(.*rank=4.*\))$", (ROOT / path).read_text(), re.MULTILINE)
    assert [eval(call, {"PowerSGDState": hooks.PowerSGDState}).start_powerSGD_iter for call in calls] == [0]


def test_the_readme_promises_the_versions_that_are_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(row for row in (ROOT / "README.md").read_text().splitlines() if row.startswith("| oldest |"))
    _, _, python, torch_, numba, numpy, _, _ = (cell.strip() for cell in oldest.split("|"))
    assert project["requires-python"] == f">={python}"
    assert {f"torch>={torch_.removesuffix('.0')}", f"numpy>={numpy.removesuffix('.4')}"} < set(project["dependencies"])
    assert f"numba>={numba.removesuffix('.0')}" in project["optional-dependencies"]["fast"]


def test_the_license_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
