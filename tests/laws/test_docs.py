"""The docs are true: the codec that `docs/extending.md` shows passes the laws, and the README's specs can be built."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

import gradwire
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


def test_every_spec_of_the_readme_can_be_built() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| spec |") : text.index("Options follow commas")]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    specs = [spec for row in rows for spec in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(specs) >= 10
    for spec in specs:
        gradwire.parse(spec)


def test_every_method_stands_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    families = {re.sub(r"int\d", "int", name) for name in gradwire.methods()}
    assert [name for name in families if f"`{name}" not in text] == []
