"""How libraries read the values of environment variables, and which values they read as something else.

NCCL reads numbers by C's `strtoll` with base 0, which takes what it can from the left: `true` becomes 0, `4M` becomes
4, and `010` is octal. Nothing is said about it. PyTorch refuses what it cannot read, and raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gradwire.core.nearest import nearest

_DIGITS = {16: "0123456789abcdef", 10: "0123456789", 8: "01234567"}


class Misread(NamedTuple):
    """What becomes of a value that is not legal.

    Attributes:
        becomes: what the library makes of it, as the end of a sentence that begins with the variable and its value.
        remedy: what to write instead.
        stops: whether the library raises; else it goes on with another value.
    """

    becomes: str
    remedy: str
    stops: bool = False


class Kind(Protocol):
    """How a value is read."""

    @property
    def legal(self) -> str:
        """The legal values, for people."""
        ...

    def misread(self, text: str) -> Misread | None:
        """What becomes of a value that is not legal; None of one that is."""
        ...


class Parsed(NamedTuple):
    """What `strtoll` makes of a text.

    Attributes:
        value: the number; 0 where there are no digits.
        rest: what it left.
        base: 8, 10 or 16; None where there are no digits.
    """

    value: int
    rest: str
    base: int | None


def strtoll(text: str) -> Parsed:
    """Read a number as C's `strtoll(text, end, 0)` does.

    >>> strtoll("010"), strtoll("0x20"), strtoll("4M"), strtoll("true")
    (Parsed(value=8, rest='', base=8), Parsed(value=32, rest='', base=16), Parsed(value=4, rest='M', base=10), \
Parsed(value=0, rest='true', base=None))
    """
    match = re.match(r"\s*([+-]?)(0[xX](?=[0-9a-fA-F])|0(?=[0-7])|)", text)
    assert match is not None  # each of its parts may be empty
    base = {"": 10, "0": 8}.get(match[2], 16)
    tail = text[match.end() :]
    count = next((place for place, c in enumerate(tail.lower()) if c not in _DIGITS[base]), len(tail))
    if not count:
        return Parsed(0, text, None)
    value = int(tail[:count], base)
    return Parsed(-value if match[1] == "-" else value, tail[count:], base)


@dataclass(frozen=True)
class Number:
    """A whole number that NCCL reads.

    Attributes:
        low: the least; None for no limit.
        high: the largest.
        among: the only ones.
        multiple: of which it must be one.

    >>> Number(0, 1).misread("true").becomes
    'is read as 0: NCCL reads numbers by strtoll, which finds no digits in it'
    >>> Number().misread("010").becomes
    'is read as 8: a leading 0 makes it octal'
    >>> Number(0, 31).misread("40").becomes, Number(0, 31).misread("22")
    ('is not legal', None)
    """

    low: int | None = None
    high: int | None = None
    among: tuple[int, ...] = ()
    multiple: int = 1

    @property
    def legal(self) -> str:
        """Which numbers are legal, for people."""
        if self.among:
            return " or ".join(map(str, self.among))
        if self.multiple > 1:
            return f"a multiple of {self.multiple} from {self.low} to {self.high}"
        if self.low is not None and self.high is not None:
            return f"{self.low} or {self.high}" if self.high - self.low == 1 else f"{self.low} to {self.high}"
        return "a whole number" if self.low is None else f"a whole number of {self.low} or more"

    def misread(self, text: str) -> Misread | None:
        """What becomes of a value that is not legal; an empty one counts as not set."""
        value, rest, base = strtoll(text)
        remedy = f"Write {self.legal}."
        if not text.strip():
            return None
        if base is None:
            return Misread("is read as 0: NCCL reads numbers by strtoll, which finds no digits in it", remedy)
        if rest.strip():
            return Misread(f"is read as {value}: NCCL reads numbers by strtoll, which drops {rest!r}", remedy)
        if base == 8:
            return Misread(f"is read as {value}: a leading 0 makes it octal", f"Write it without the 0. {remedy}")
        return None if self._is_legal(value) else Misread("is not legal", remedy)

    def _is_legal(self, value: int) -> bool:
        if self.among:
            return value in self.among
        if value % self.multiple:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Words:
    """One of a few words, or a list of them.

    Attributes:
        words: the legal ones.
        otherwise: what becomes of another one.
        any_case: whether capitals do not matter.
        separator: between several; None for one alone.
        stops: whether the library raises on another one.
        also: further legal values as a regular expression.

    >>> Words(("LOC", "SYS"), "is ignored").misread("sys").becomes
    'is ignored: capitals matter'
    >>> Words(("OFF", "INFO"), "is refused", any_case=True, stops=True).misread("1").remedy
    'Write OFF or INFO.'
    """

    words: tuple[str, ...]
    otherwise: str = "is not legal"
    any_case: bool = False
    separator: str | None = None
    stops: bool = False
    also: str | None = None

    @property
    def legal(self) -> str:
        """Which words are legal, for people."""
        *most, last = self.words
        listed = f"{', '.join(most)} or {last}" if most else last
        return f"a list of {listed}" if self.separator else listed

    def misread(self, text: str) -> Misread | None:
        """What becomes of a word that is not legal."""
        for word in self._words(text):
            if not self._is_legal(word):
                right = next((each for each in self.words if each.lower() == word.lower()), None)
                named = ": capitals matter" if right else f": there is no {word!r}" if self.separator else ""
                close = right or nearest(word, {each: each for each in self.words})
                return Misread(f"{self.otherwise}{named}", f"Write {close or self.legal}.", self.stops)
        return None

    def _words(self, text: str) -> Sequence[str]:
        if not text:
            return ()
        return [part.strip() for part in text.lstrip("^").split(self.separator)] if self.separator else [text]

    def _is_legal(self, word: str) -> bool:
        is_also = self.also is not None and re.fullmatch(self.also, word) is not None
        return is_also or word in self.words or (self.any_case and word.lower() in map(str.lower, self.words))


ALGORITHM_NAMES = ("Ring", "Tree", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOL_NAMES = ("LL", "LL128", "Simple")
_FUNCTIONS = ("allreduce", "allgather", "reducescatter", "broadcast", "reduce")


@dataclass(frozen=True)
class Choice:
    """What `NCCL_ALGO` and `NCCL_PROTO` take: words, or lists of words for each function.

    >>> ALGORITHMS.misread("ring,collnetdirect;allreduce:^tree")
    >>> ALGORITHMS.misread("AUTO").becomes
    "makes NCCL 2.24 and later fail, and older ones ignore it: there is no 'AUTO'"
    """

    words: tuple[str, ...]

    @property
    def legal(self) -> str:
        """Which words are legal, for people."""
        return f"a list of {', '.join(self.words[:-1])} or {self.words[-1]}, or leave it out to let NCCL choose"

    def misread(self, text: str) -> Misread | None:
        """What becomes of a word that is not legal."""
        for part in filter(None, text.split(";")):
            function, colon, listed = part.rpartition(":")
            if colon and function.strip().lower() not in _FUNCTIONS:
                return self._fails(function, f"Name functions among {', '.join(_FUNCTIONS)}.")
            for word in listed.lstrip("^").split(","):
                if word.strip().lower() not in map(str.lower, self.words):
                    return self._fails(word.strip(), f"Write {self.legal}.")
        return None

    def _fails(self, word: str, remedy: str) -> Misread:
        return Misread(f"makes NCCL 2.24 and later fail, and older ones ignore it: there is no {word!r}", remedy, True)


ALGORITHMS, PROTOCOLS = Choice(ALGORITHM_NAMES), Choice(PROTOCOL_NAMES)


@dataclass(frozen=True)
class Text:
    """Anything.

    Attributes:
        legal: what it should be, for people.
        pattern: a regular expression that it must match; None for none.
        otherwise: what becomes of a value that does not match it.
        stops: whether the library raises then.
    """

    legal: str = "any text"
    pattern: str | None = None
    otherwise: str = "is not legal"
    stops: bool = False

    def misread(self, text: str) -> Misread | None:
        """What becomes of a value that does not match."""
        if self.pattern is None or not text or re.fullmatch(self.pattern, text):
            return None
        return Misread(self.otherwise, f"Write {self.legal}.", self.stops)


@dataclass(frozen=True)
class TorchNumber:
    """A whole number that PyTorch reads, which raises on what is none.

    >>> TorchNumber(0, 3).misread("on").becomes, TorchNumber(0, 3).misread("7").becomes
    ('is refused: it is no whole number', 'is not legal')
    """

    low: int | None = None
    high: int | None = None

    @property
    def legal(self) -> str:
        """Which numbers are legal, for people."""
        return Number(self.low, self.high).legal

    def misread(self, text: str) -> Misread | None:
        """What becomes of a value that is not legal."""
        try:
            value = int(text)
        except ValueError:
            drops = " or cut behind its digits" if text[:1].isdigit() else ""  # `int` refuses what `std::stoi` cuts
            return Misread(f"is refused{drops}: it is no whole number", f"Write {self.legal}.", True)
        is_below, is_above = self.low is not None and value < self.low, self.high is not None and value > self.high
        return Misread("is not legal", f"Write {self.legal}.", True) if is_below or is_above else None


TORCH_FLAG = Words(
    ("0", "1", "true", "false", "yes", "no", "t", "f", "y", "n"), "makes PyTorch raise", any_case=True, stops=True
)
FLAG = Number(0, 1)
LEVEL = Words(
    ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS"), "is ignored, so NCCL chooses", also=r"[0-9]+|NVB|C2C|PXN|P2C|DIS"
)
INTERFACES = Text("prefixes of interfaces, such as eth or =eth0,eth1 or ^docker,lo", r"\^?=?[^\s,^=]+(,[^\s,^=]+)*")
PATH = Text("a path without ~", r"[^~].*", "is not found: NCCL does not expand ~")
PLAIN = Text()
