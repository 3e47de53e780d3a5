"""What a parameter is for in its model, told by the type of its module, or by its name where only that is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

Role = Literal["embedding", "norm", "bias", "output", "other"]
ROLES: tuple[str, ...] = get_args(Role)

_EMBEDDING = re.compile(r"embed|^(wte|wpe|emb)$")
_NORM = re.compile(r"norm|^(ln|bn)(_|\d|$)")
_OUTPUT = frozenset({"lm_head", "head", "classifier", "score", "qa_outputs", "output_layer"})
_OUTPUT_KINDS = ("Linear", "Conv")
"""How classes are called that may be a model's last layer; those of sharded, quantized and adapted models too."""


def role_of_name(name: str, shape: Sequence[int]) -> Role:
    """Return the role that a parameter's name and shape suggest.

    Args:
        name: as `named_parameters` has it, without what wrappers add.
        shape: what has fewer than two dimensions and is no norm's is a bias.

    >>> role_of_name("transformer.wte.weight", (256, 64)), role_of_name("blocks.0.ln_1.weight", (64,))
    ('embedding', 'norm')
    >>> role_of_name("lm_head.weight", (256, 64)), role_of_name("blocks.0.mlp.weight", (64, 64))
    ('output', 'other')
    """
    parts = [part.lower() for part in name.split(".")]
    if any(_NORM.search(part) for part in parts):
        return "norm"
    if any(_EMBEDDING.search(part) for part in parts):
        return "embedding"
    if len(shape) < 2:
        return "bias"
    return "output" if _OUTPUT.intersection(parts) else "other"


def roles_of(model: nn.Module) -> dict[Tensor, Role]:
    """Return the role of every parameter of a model, in the order of `named_parameters`.

    Types of modules come first: whatever is an `Embedding` or a norm of any kind. A parameter with fewer than two
    dimensions is a bias otherwise. The output layer is the last linear or convolutional layer that was registered; if
    it shares its weight with an embedding, the weight is an embedding. Where types say nothing, names do.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9))
    >>> list(roles_of(model).values())
    ['embedding', 'other', 'output', 'bias']
    """
    output = None
    for module in model.modules():
        if any(kind in type(module).__name__ for kind in _OUTPUT_KINDS) and hasattr(module, "weight"):
            output = module.weight
    found: dict[Tensor, Role] = {}
    kinds: dict[Tensor, str] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            kinds.setdefault(parameter, type(module).__name__.lower())
    for name, parameter in model.named_parameters():
        kind = kinds[parameter]
        if "embedding" in kind:
            found[parameter] = "embedding"
        elif "norm" in kind:
            found[parameter] = "norm"
        elif parameter is output and parameter.ndim > 1:
            found[parameter] = "output"
        else:
            guessed = role_of_name(name, parameter.shape)
            found[parameter] = "other" if guessed == "output" and output is not None else guessed
    return found
