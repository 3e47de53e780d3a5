"""Installation from a wheel and from a Git address: an empty environment has the package, its data and its command."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# setuptools is here, since PyTorch needs it; an isolated build would fetch another one
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
BUILD = ["--no-deps", "--no-build-isolation"]

pytestmark = pytest.mark.one_of("environment")


def run(*command: str, cwd: Path) -> str:
    """What a command prints; it sees nothing of this tree."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tree as it stands, changes that are not committed included."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        run("cp", "-r", str(ROOT / name), str(folder), cwd=folder)
    author = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "All of it"]):
        run("git", *words, cwd=folder)
    return folder


@pytest.fixture(scope="module", params=["wheel", "git"])
def environment(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with gradwire; of all else it borrows what is installed here."""
    folder = tmp_path_factory.mktemp(request.param)
    source = f"git+file://{repository}"
    if request.param == "wheel":
        run(*PIP, "wheel", *BUILD, "--wheel-dir", str(folder), source, cwd=folder)
        (wheel,) = folder.glob("gradwire-*.whl")
        source = str(wheel)
    venv.create(folder / "env", with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    python = str(folder / "env" / "bin" / "python")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # an editable gradwire does not come along
    run(*PIP, "--python", python, "install", "--no-compile", *BUILD, source, cwd=folder)
    return folder / "env"


def packages_of(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def test_the_package_and_its_command_work(environment: Path, tmp_path: Path) -> None:
    place = run(str(environment / "bin" / "python"), "-c", "import gradwire; print(gradwire.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(environment)
    assert "int4" in run(str(environment / "bin" / "gradwire"), "methods", cwd=tmp_path)


def test_nothing_is_missing_and_nothing_too_much(environment: Path) -> None:
    installed = packages_of(environment) / "gradwire"
    wanted = {path.relative_to(ROOT / "src" / "gradwire") for path in (ROOT / "src" / "gradwire").rglob("*")}
    wanted = {path for path in wanted if path.suffix in (".py", ".pyi", ".html", ".css", ".js", ".typed")}
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    found = {path for path in found if path.suffix != ".pyc"}
    assert found == wanted | {Path("py.typed")}


def test_extras_that_pages_name_can_be_had(environment: Path) -> None:
    (metadata,) = packages_of(environment).glob("gradwire-*.dist-info")
    offered = set(PathDistribution(metadata).metadata.get_all("Provides-Extra") or [])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {name for page in pages for name in re.findall(r"gradwire\[(\w+)\]", page.read_text())}
    assert {"private", "flower", "ray"} <= named <= offered
