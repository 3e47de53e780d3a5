#!/usr/bin/env python3
"""Whether the tests notice when drivers, adapters and `gradwire.sync` are wrong.

A mutant is the source with one operator, condition, constant, result or statement changed. It is *caught* if a test
that belongs to its file fails, or hangs. One that no test could catch, since it computes the same, is listed in
`EQUIVALENT` with the reason. `docs/building/mutants.md` has the results.

    tools/mutants.py --list          which mutants are drawn
    tools/mutants.py                 run their tests, in a copy of the tree
    tools/mutants.py --only 3 17     these two
    tools/mutants.py --cases drawn   with the tests that `make test` runs, and not with all
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutant_tests import EQUIVALENT, FILES, LEFT_OUT, Stage

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("src/gradwire")
SEED, COUNT = 9, 180
LIMIT_S = 300.0
"""For the tests of one stage: one that takes longer hangs, which counts as caught."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: path below `src/gradwire`.
        line: where it is.
        change: what was there and what is there now.
        begin: the first byte that is replaced.
        end: the byte behind the last one.
        text: what takes their place.
    """

    file: str
    line: int
    change: str
    begin: int
    end: int
    text: str

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why no test can catch it; None where one can."""
        return EQUIVALENT.get((self.file, self.change))

    def applied(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


# --------------------------------------------------------------------------------------------- finding them

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}
SILENT = re.compile(r"^(warnings\.warn|logger\.\w+|\w+\.add_note)$")
"""Calls whose arguments are for people."""
SHORT = 25
"""Characters below which a change is shown with the rest of its line."""


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file; what only people read is left alone."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._may_be_none = False

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        begin, end = self._span(node)
        before, after = self.source[begin:end].decode(), text
        if len(before) < SHORT and node.lineno == node.end_lineno:  # which of many zeros? its line says so
            first, behind = self._starts[node.lineno - 1 : node.lineno + 1]
            left, right = self.source[first:begin].decode(), self.source[end:behind].decode()
            before, after = f"{left}{before}{right}", f"{left}{after}{right}"
        change = f"{' '.join(before.split())} -> {' '.join(after.split())}"
        self.found.append(Mutant(self.file, node.lineno, change, begin, end, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self._span(node)
        return self.source[begin:end].decode()

    def _operand(self, node: ast.expr) -> str:
        simple = isinstance(node, ast.Name | ast.Constant | ast.Attribute | ast.Call | ast.Subscript)
        return self._text(node) if simple else f"({self._text(node)})"

    # What is left alone

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Bodies and defaults; not decorators and annotations."""
        if node.name == "__repr__" or (self.file, node.name) in LEFT_OUT:
            return
        outer, returns = self._may_be_none, ast.unparse(node.returns) if node.returns else ""
        self._may_be_none = bool(re.search(r"\b(None|bool)\b", returns)) and returns != "None"
        for part in (*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body):
            self.visit(part)
        self._may_be_none = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bodies; not decorators and bases."""
        if (self.file, node.name) not in LEFT_OUT:
            for part in node.body:
                self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """A message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """A check of our own: what it checks fails elsewhere."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def visit_keyword(self, node: ast.keyword) -> None:
        """An argument, if it is not for people."""
        if node.arg not in ("daemon", "stacklevel", "name"):
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """A call, if it does not speak to people."""
        if not SILENT.match(ast.unparse(node.func)):
            self.generic_visit(node)

    # What is changed

    def visit_Compare(self, node: ast.Compare) -> None:
        """The other side of a boundary, or the opposite."""
        if len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = self._operand(node.left), self._operand(node.comparators[0])
            self._add(node, f"{left} {COMPARISONS[type(node.ops[0])]} {right}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator; a factor left out."""
        texts = any(isinstance(n, ast.JoinedStr | ast.List | ast.Tuple) or _is_text(n) for n in (node.left, node.right))
        left, right = self._operand(node.left), self._operand(node.right)
        if isinstance(node.op, ast.Mult) and not texts:
            self._add(node, f"({left} / {right})")
            self._add(node, left)
        elif type(node.op) in OPERATORS and not texts:
            self._add(node, f"({left} {OPERATORS[type(node.op)]} {right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, and the other way round."""
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._add(node, f"({other.join(self._operand(value) for value in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """A `not` or a sign left out."""
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, self._operand(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """The other truth; one more."""
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        """None where that may be returned, or where it is false."""
        if self._may_be_none and node.value is not None and not _is_none(node.value):
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """A condition that always holds, or never."""
        self._decide(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """As a statement's."""
        self._decide(node.test)
        self.generic_visit(node)

    def _decide(self, test: ast.expr) -> None:
        if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test)):
            self._add(test, "True")
            self._add(test, "False")

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call left out."""
        if isinstance(node.value, ast.Call) and not SILENT.match(ast.unparse(node.value.func)):
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """An assignment left out, to what is there before: without a name the rest would not run at all."""
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """The same."""
        self._add(node, "pass")
        self.visit(node.value)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants_of(file: str, root: Path = ROOT) -> list[Mutant]:
    """Every mutant of a file, in the order of its source."""
    source = (root / SOURCE / file).read_bytes()
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutant: (mutant.begin, mutant.end, mutant.text))


def draw(count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """`count` mutants: of each file in proportion to how many it has, and one at least where there are enough."""
    found = {file: mutants_of(file, root) for file in FILES}
    total = sum(map(len, found.values()))
    shares = {file: count * len(mutants) / total for file, mutants in found.items()}
    drawn = {file: max(1, int(share)) for file, share in shares.items()}
    for file in sorted(drawn, key=lambda file: drawn[file] - shares[file]):
        drawn[file] += sum(drawn.values()) < count
    while sum(drawn.values()) > count and max(drawn.values()) > 1:
        drawn[max((file for file in drawn if drawn[file] > 1), key=lambda file: drawn[file] - shares[file])] -= 1
    return [
        mutant
        for file, mutants in found.items()
        # each file has a generator of its own: a change to one leaves the draws of the others as they are
        for mutant in random.Random(f"{seed} {file}").sample(mutants, min(drawn[file], len(mutants)))
    ]


# -------------------------------------------------------------------------------------------- running tests


@dataclass
class Copy:
    """A copy of the tree, in which one file at a time is changed. Compiled kernels come along, and stay."""

    root: Path
    cases: str
    caught_by: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, source: Path, to: Path, cases: str) -> Copy:
        """Copy what tests need; `cases` are "all" or "drawn", as for pytest."""
        for name in ("src", "tests", "docs", "benchmarks", "tools"):
            shutil.copytree(source / name, to / name, dirs_exist_ok=True)
        for name in ("pyproject.toml", "README.md", "conftest.py"):
            shutil.copy2(source / name, to / name)
        return cls(to, cases)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Generator[None]:
        """Apply a mutant while the block runs."""
        path = self.root / SOURCE / mutant.file
        source, stat = path.read_bytes(), path.stat()
        path.write_bytes(mutant.applied(source))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def first_failure(self, stages: Sequence[Stage]) -> str | None:
        """The first test that fails or hangs; None if all pass."""
        return next((failed for stage in stages if (failed := self._failure(stage))), None)

    def unsound(self, tests: set[str]) -> str | None:
        """The first of these tests that fails on the unchanged tree, so that its failure says nothing."""
        named = sorted(test for test in tests if "::" in test)
        return self._failure(tuple(named)) if named else None

    def _failure(self, stage: Stage) -> str | None:
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--cases", self.cases]
        command = [sys.executable, "-m", "pytest", *arguments, *stage]
        path = os.pathsep.join(filter(None, [str(self.root / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"no end within {LIMIT_S:.0f} s"
        if process.returncode == 0:
            return None
        if process.returncode == 5 and self.cases == "drawn":  # all of the stage's tests are for the long command
            return None
        if process.returncode == 5:
            raise SystemExit(f"no test matches {' '.join(stage)}")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        return failed[1] if failed else f"the end of pytest with status {process.returncode}"


def judged(mutant: Mutant, copy: Copy) -> str:
    """What caught a mutant, or that none did, or why none could."""
    if mutant.reason is not None:
        return f"equivalent: {mutant.reason}"
    with copy.changed(mutant):
        failed = copy.first_failure(FILES[mutant.file])
    if failed is None:
        return "**SURVIVED**"
    copy.caught_by.add(failed)
    return f"`{failed.removeprefix('tests/')}`"


def main() -> int:
    """List or run mutants; the exit status says whether any survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the draw and run nothing")
    parser.add_argument("--only", type=int, nargs="+", metavar="I", help="run these of the list")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw")
    parser.add_argument("--count", type=int, default=COUNT, help="how many to draw")
    parser.add_argument("--cases", choices=("all", "drawn"), default="all", help="of the tests that run")
    parser.add_argument("--copy", type=Path, help="where to copy the tree to, and leave it (default: a folder in /tmp)")
    arguments = parser.parse_args()
    drawn = list(enumerate(draw(arguments.count, arguments.seed)))
    drawn = [drawn[i] for i in arguments.only] if arguments.only else drawn
    if arguments.list:
        print("\n".join(f"{i:3} {mutant.where:38} {mutant.change}" for i, mutant in drawn))
        return 0
    print("| | where | change | caught by | s |\n|---|---|---|---|---|", flush=True)
    survived = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Copy.of(ROOT, arguments.copy or Path(temporary), arguments.cases)
        for i, mutant in drawn:
            began = time.monotonic()
            said = judged(mutant, copy)
            survived += said.startswith("**")
            change = mutant.change.replace("|", "\\|").replace(" -> ", "` -> `")
            print(f"| {i} | {mutant.where} | `{change}` | {said} | {time.monotonic() - began:.0f} |", flush=True)
        if unsound := copy.unsound(copy.caught_by):
            print(f"{unsound} fails without a mutant too")
    return 1 if survived or unsound else 0


if __name__ == "__main__":
    sys.exit(main())
