"""The wire format is pinned: a payload written today is read by the version of tomorrow.

`tests/golden/payloads.json` holds the payload of one fixed tensor for every codec. `pytest --golden=new` adds codecs
that are not in it and leaves the others; only `--golden=replace` rewrites what changed, which is a new wire format and
belongs in the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.core.key import Key

from .checks import wire_of
from .subjects import codecs

FILE = Path(__file__).parent.parent / "golden" / "payloads.json"
KEY = Key(seed=20, step=26, name="golden", stage="first", rank=1)
NUMEL = 61


def fixed_tensor() -> Tensor:
    """Dyadic numbers of different sizes, so that sums of them are exact in any order."""
    i = torch.arange(NUMEL, dtype=torch.int64)
    return ((i * 7919) % 1009 - 504).to(torch.float32) / 2.0 ** (i % 7)


def read() -> dict[str, str]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


@pytest.mark.parametrize("codec", codecs(), ids=repr)
def test_payload_is_as_it_was(codec: Codec, pytestconfig: pytest.Config) -> None:
    name, mode = repr(codec), pytestconfig.getoption("--golden")
    payload = bytes(wire_of(codec, fixed_tensor(), KEY).tolist()).hex()
    known = read()
    if (mode == "new" and name not in known) or mode == "replace":
        known[name] = payload
        FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
    assert name in known, f"no golden payload of {name}: run `pytest --golden=new tests/laws/test_golden.py`"
    assert payload == known[name], (
        f"the wire format of {name} changed: payloads of older versions cannot be read. If that is meant, say so "
        "in the changelog and run `pytest --golden=replace tests/laws/test_golden.py`"
    )


@pytest.mark.parametrize("codec", codecs(), ids=repr)
def test_golden_payload_decodes(codec: Codec) -> None:
    """What was written before still says the same."""
    x = fixed_tensor()
    wire = torch.tensor(list(bytes.fromhex(read()[repr(codec)])), dtype=torch.uint8)
    payload = codec.layout(NUMEL).views(wire)
    assert torch.equal(codec.decode(payload, x, KEY), codec.decode(codec.encode(x, KEY), x, KEY))


def test_nothing_golden_is_left_over() -> None:
    assert set(read()) == {repr(codec) for codec in codecs()}
