"""Attention of a block of queries to a block of keys, with what is needed to merge it with other blocks.

For a query q and the keys k_j that it sees, with s_j = scale q . k_j,

    lse = log(sum over j of exp(s_j)),    out = sum over j of exp(s_j - lse) v_j

and two blocks of keys a and b are merged by (Liu et al. 2023, "Ring attention", in the form that divides by nothing)

    lse = log(exp(lse_a) + exp(lse_b)),    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A query that sees none of the keys has lse = -inf and out = 0.

The share of a block in the gradient, with the lse and the out of all keys, P_j = exp(s_j - lse) and D = dout . out, is

    dv_j = P_j dout,    ds_j = P_j (dout . v_j - D),    dq = scale sum over j of ds_j k_j,    dk_j = scale ds_j q

(Dao et al. 2022, "FlashAttention", appendix B.4). Dropout multiplies weights by factors f_j, with the same lse:

    out = sum over j of exp(s_j - lse) f_j v_j,    dv_j = P_j f_j dout,    ds_j = P_j (f_j dout . v_j - D)

Shapes: q (B, H, S, D), k (B, G, T, D), v (B, G, T, E), out (B, H, S, E), lse (B, H, S). H is a multiple of G, and
H / G query heads in a row share a key head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.parallel.sequences.masks import Seen

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a block, none of whose dimensions is 0. Autograd passes it where there are factors.

    Args:
        q, k, v: float32 or float64, of one dtype.
        scale: of scores.
        seen: not "none".
        factors: of weights, (B, H, S, T); None where nothing is dropped.
    """
    if factors is None and _served(q, v):
        out, lse = _FLASH(q, k, v, 0.0, _is_causal(seen), attn_mask=_additive(seen, q), scale=scale)
        if isinstance(seen, Tensor):
            # PyTorch gives a query that sees no key an lse of 0, as if its keys had weight 1
            lse = lse.masked_fill(~seen.any(1).to(lse.device), -math.inf)
        return out, lse
    scores = _scores(q, k, scale, seen)
    lse = scores.logsumexp(-1)
    weights = _dropped(_weights(scores, lse), factors)
    return _grouped(weights, k.shape[1]).matmul(v).view(*q.shape[:3], v.shape[-1]), lse


def block_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    seen: Seen,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of dq, dk and dv, from the out and lse of all keys.

    Args:
        grad: of out.
        q, k, v, scale, seen, factors: as for `block_attention`.
        out, lse: of all keys.
    """
    if factors is None and _served(q, v):
        given = grad, q, k, v, out, lse, 0.0, _is_causal(seen)
        return _FLASH_BACKWARD(*given, attn_mask=_additive(seen, q), scale=scale)  # type: ignore[no-any-return]
    weights = _weights(_scores(q, k, scale, seen), lse)
    heads = k.shape[1]
    grads, queries, of_keys = (_grouped(x, heads) for x in (grad, q, weights))
    of_factors = None if factors is None else _grouped(factors, heads)
    dv = _dropped(of_keys, of_factors).mT.matmul(grads)
    ds = of_keys * (_dropped(grads.matmul(v.mT), of_factors) - _grouped((grad * out).sum(-1, keepdim=True), heads))
    dq = scale * ds.matmul(k).view(q.shape)
    return dq, scale * ds.mT.matmul(queries), dv


def merged(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a block into what there is.

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -math.inf)
    >>> merged(out, lse, torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 1e4))
    (tensor([[[[1., 1.]]]]), tensor([[[10000.]]]))
    """
    both = torch.logaddexp(lse, block_lse)
    share = _weights(block_lse[..., None], both)
    return out + share * (block_out - out), both


def _served(q: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's attention for CPUs takes the block."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _is_causal(seen: Seen) -> bool:
    return isinstance(seen, str) and seen == "causal"


def _additive(seen: Seen, q: Tensor) -> Tensor | None:
    if isinstance(seen, str):
        return None
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen.to(q.device), -math.inf)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """(B, H, S, D) as (B, G, H / G * S, D): queries that share a key head, end to end."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, scale: float, seen: Seen) -> Tensor:
    scores = (scale * _grouped(q, k.shape[1])).matmul(k.mT).view(*q.shape[:3], k.shape[2])
    if isinstance(seen, str):
        if seen == "all":
            return scores
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen.to(q.device), -math.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 where there is nothing to see, and both are -inf."""
    return (scores - lse[..., None]).exp().masked_fill(scores.isneginf(), 0.0)


def _dropped(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors
