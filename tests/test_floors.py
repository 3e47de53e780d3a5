"""Imports only go down: each folder of the package stands on a floor and may import from lower ones.

Nor do modules import each other in circles, and a name is that of one class.
"""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import gradwire

PACKAGE = Path(gradwire.__file__).parent
FLOORS = (
    ("core",),
    ("flight", "topology"),
    ("peers",),
    ("kernels",),
    ("codecs",),
    ("reducers",),
    ("advice", "baselines", "composition"),
    ("methods", "spec"),
    ("sending",),
    ("drivers",),
    ("choosing",),
    ("session",),
    ("federated", "sync"),
    ("asynchronous",),
    ("catalogue",),
    ("recipes",),
    ("profiling",),
    ("adapters",),
    ("parallel",),
    ("overlap",),
    ("hooks",),
    ("network", "option_fields", "tasks"),
    ("training",),
    ("ranks",),
    ("compare",),
    ("federate",),
    ("doctor",),
    ("config",),
    ("bench",),
    ("planning", "simulation"),
    ("cases",),
    ("report",),
    ("watch",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
# `gradwire/__init__.py` is the shop window: it re-exports from the adapters down, and those above are its customers.
WINDOW = LEVEL["adapters"]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def home(path: Path) -> str:
    """The folder or single module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything of gradwire that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, so that their floor can be seen"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "gradwire")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    assert home(path) in LEVEL, f"{home(path)} stands on no floor: add it to FLOORS"
    for name in imports(path):
        here = LEVEL[home(path)]
        target = name.partition(".")[2].partition(".")[0]
        if target not in LEVEL:
            assert here > WINDOW, f"{path} imports {name}: import from the module that defines it"
            continue
        if target == home(path):
            continue
        level = LEVEL[target]
        same_floor = level == here and {target, home(path)} == {"methods", "spec"}
        assert level < here or same_floor, f"{path} imports {name}, which is not below it"


COLLECTIVES = ("all_", "barrier", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")
"""How their names begin."""
CALL_PYTORCH = {
    "adapters/accumulation/rank_sums.py": "counts tokens of models that may have no session",
    "bench/collectives.py": "times PyTorch's own calls",
    "compare/apart.py": "ranks of a comparison, whose supervisor names the one that failed",
    "compare/trainer.py": "the same",
    "compare/worker.py": "the same",
    "drivers/process_group.py": "the transport",
    "overlap/isolated.py": "times PyTorch's own calls",
    "overlap/meter.py": "measures models that may have no session",
    "profiling/recording.py": "the same",
    "profiling/torch_hook.py": "does what DDP does without a hook",
}
"""Files that call collectives of torch.distributed themselves, and why: elsewhere errors name the rank at fault."""


def test_collectives_go_through_a_transport() -> None:
    found: set[str] = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                found |= {path.relative_to(PACKAGE).as_posix()} if node.attr.startswith(COLLECTIVES) else set()
    assert found == set(CALL_PYTORCH)


def test_threads_may_meet_types_that_msgspec_reads() -> None:
    """Decoders at the top of a module are made while it is imported, which one thread does alone."""
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        made = {id(inside) for node in tree.body if isinstance(node, ast.Assign) for inside in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msgspec"):
                assert not {"convert", "decode", "Decoder"} & {alias.name for alias in node.names}, path
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
                continue
            deed = ast.unparse(node.func).rpartition(".")[2]
            kinds = {"convert": node.args[1:2], "Decoder": node.args[:1]}.get(deed, [])
            reads = deed in ("convert", "decode", "Decoder")
            kinds += [word.value for word in node.keywords if reads and word.arg == "type"]
            is_own = path.name == "checked.py" and deed == "Decoder"
            if id(node) not in made and not is_own:
                told = [ast.unparse(kind) for kind in kinds]
                assert all(kind.startswith("thread_safe(") for kind in told), f"{path}:{node.lineno}"


def test_methods_do_not_know_the_language_that_names_them() -> None:
    assert not any(name.startswith("gradwire.spec") for name in imports(PACKAGE / "methods.py"))


SHARED_NAMES = {
    "Constant": "`gradwire.asynchronous.Constant` is a rate, `gradwire.sync.Constant` a schedule of windows",
    "GradwireCallback": "of Lightning and of Transformers, whose users never meet the other one",
    "Hierarchical": "a reducer, whose name stands in saved states, and `gradwire.sync.Hierarchical`",
    "Mean": "a server's step, `gradwire.federated.Mean`, and an outer step, `gradwire.sync.Mean`",
    "Ring": "a route, whose name stands in saved states, and a graph of `gradwire.sync.gossip`",
    "Weighted": "a reducer, whose name stands in saved states, and a graph of `gradwire.sync.gossip`",
}
"""Names of two classes each, which users import from the two places that are named here."""


def test_no_two_public_classes_have_one_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: homes for name, homes in found.items() if len(homes) > 1 and name not in SHARED_NAMES} == {}
    assert all(len(found[name]) == 2 for name in SHARED_NAMES), "a name is no longer shared: take it off the list"


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports inside of functions and for types alone count too."""
    names = {_dotted(path): path for path in MODULES}
    edges = {name: {_module(target, names) for target in imports(path)} - {name, ""} for name, path in names.items()}
    sorter = graphlib.TopologicalSorter(edges)
    sorter.prepare()  # raises `CycleError` with the circle


def _dotted(path: Path) -> str:
    return ".".join(("gradwire", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _module(target: str, names: Mapping[str, Path]) -> str:
    """The module that a dotted name of an import belongs to, "" for the package itself."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in names), "")
