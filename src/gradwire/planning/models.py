"""Models by name, and from the config.json of a model on Hugging Face."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.planning.transformer import Transformer


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(name, layers, hidden, heads, vocabulary=51_200, sequence=2048)


def _llama(
    name: str, layers: int, hidden: int, heads: int, keys: int, inner: int, vocabulary: int, sequence: int
) -> Transformer:
    return Transformer(
        name, layers, hidden, heads, vocabulary, sequence, key_heads=keys, inner=inner, gated=True, tied=False
    )


def _mixtral(
    name: str, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, sequence: int
) -> Transformer:
    dense = _llama(name, layers, hidden, heads, 8, inner, vocabulary, sequence)
    return replace(dense, experts=8, chosen=2)


KNOWN = {
    found.name: found
    for found in (
        Transformer("gpt2", 12, 768, 12, 50_257, 1024),
        Transformer("gpt2-xl", 48, 1600, 25, 50_257, 1024),
        _gpt("gpt3-1.7b", 24, 2304, 24),
        _gpt("gpt3-7.5b", 36, 4096, 32),
        _gpt("gpt3-22b", 48, 6144, 64),
        _gpt("gpt3-39b", 48, 8192, 64),
        _gpt("gpt3-145b", 80, 12_288, 96),
        _gpt("gpt3-175b", 96, 12_288, 96),
        _gpt("gpt3-530b", 105, 20_480, 128),
        _gpt("gpt3-1t", 128, 25_600, 160),
        Transformer("bloom-176b", 70, 14_336, 112, 250_880, 2048),
        _llama("llama2-7b", 32, 4096, 32, 32, 11_008, 32_000, 4096),
        _llama("llama2-13b", 40, 5120, 40, 40, 13_824, 32_000, 4096),
        _llama("llama2-70b", 80, 8192, 64, 8, 28_672, 32_000, 4096),
        _llama("llama3-8b", 32, 4096, 32, 8, 14_336, 128_256, 8192),
        _llama("llama3-70b", 80, 8192, 64, 8, 28_672, 128_256, 8192),
        _llama("llama3-405b", 126, 16_384, 128, 8, 53_248, 128_256, 8192),
        _llama("mistral-7b", 32, 4096, 32, 8, 14_336, 32_000, 8192),
        _mixtral("mixtral-8x7b", 32, 4096, 32, 14_336, 32_000, 4096),
        _mixtral("mixtral-8x22b", 56, 6144, 48, 16_384, 32_768, 4096),
        replace(_llama("qwen3-235b-a22b", 94, 4096, 64, 4, 1536, 151_936, 4096), head_size=128, experts=128, chosen=8),
    )
}
"""Models by name. Those of GPT-3's shape are of Table 1 of Narayanan et al. (2021) and Table 3 of Korthikanti et al.
(2022)."""

GATED = (
    "deepseek",
    "gemma",
    "gemma2",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""`model_type`s whose feed-forward part has three matrices."""
TWO_MATRICES = ("bloom", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2")
"""`model_type`s whose feed-forward part has two."""
TIED = ("bloom", "gemma", "gemma2", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "starcoder2")
"""`model_type`s whose output layer is the embedding where a config.json does not say: the defaults of Transformers."""

_KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "key_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok",),
    "shared_inner": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
}


def model(name: str) -> Transformer:
    """Return a model by its name, or from a config.json: a file, or the folder that it is in.

    Args:
        name: such as "gpt3-175b", or a path.

    Raises:
        SpecError: an unknown name, with the nearest; a file that cannot be read, lacks a key or has a value that makes
            no sense, with file and key.

    >>> model("llama2-70b").layers
    80
    """
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name)
    if name.endswith(".json") or (name and path.is_dir()):
        return read_config(path / "config.json" if path.is_dir() else path)
    raise SpecError(f"no model is called {name!r}, and it is no config.json of a model: {meant(name, KNOWN)}")


def read_config(path: Path) -> Transformer:
    """Read the config.json of a model, as Transformers writes it.

    Raises:
        SpecError: see `model`.
    """
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"{path} is no config.json of a model: it holds no object with keys")
    kind = str(config.get("model_type", ""))
    if "kv_lora_rank" in config:
        raise SpecError(f"{path}: kv_lora_rank is latent attention, which the planner does not know yet")
    if kind not in GATED + TWO_MATRICES:
        raise SpecError(f"{path}: model_type {kind!r} is not known: {meant(kind, GATED + TWO_MATRICES)}")
    sizes: dict[str, int] = {}
    for field, keys in (_KEYS | _OPTIONAL).items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            sizes[field] = _whole(path, key, config[key])
        elif field in _KEYS:
            raise SpecError(f"{path}: none of the keys {', '.join(keys)} is there: it tells the {field} of the model")
    if sizes.get("experts"):
        key = "moe_intermediate_size"
        if config.get(key) is not None:
            dense = sizes.get("inner")
            sizes["inner"] = _whole(path, key, config[key])
            sizes |= {} if dense is None else {"dense_inner": dense}
            sizes["shared_inner"] = sizes.get("shared_inner", 0) or (
                _whole(path, "n_shared_experts", config.get("n_shared_experts") or 0) * sizes["inner"]
            )
    tied = config.get("tie_word_embeddings", kind in TIED)
    name = str(config.get("_name_or_path") or "") or path.resolve().parent.name
    try:
        return Transformer(name, gated=kind in GATED, tied=bool(tied), **sizes)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def _whole(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{path}: {key}={value!r} is no whole number of 0 or more")
    return value
