"""Every method gradwire offers, one line each."""

from __future__ import annotations

from gradwire.codecs import BF16, FP16, QSGD, AffineInt, BlockInt, Identity, RandomK, Sign, TopK
from gradwire.core.registry import Method, methods, register
from gradwire.reducers import PowerSGD
from gradwire.reducers.aggregate import (
    Adasum,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    PrivateMean,
    TrimmedMean,
)

__all__ = ["methods", "register"]


def _register_all() -> None:
    register(Method("none", Identity, "uncompressed", "allreduce", examples=("none",)))
    register(Method("fp16", FP16, "cast to half precision", "allreduce", examples=("fp16",)))
    register(Method("bf16", BF16, "cast to bfloat16", "allreduce", examples=("bf16",)))
    register(
        Method(
            "topk",
            TopK,
            "largest magnitudes",
            "allgather",
            feedback=True,
            argument="density",
            examples=("topk:0.01", "topk:0.3,values=bf16", "topk:0.05+int8", "topk:0.1+qsgd:15,ef=off"),
        )
    )
    register(
        Method(
            "randomk",
            RandomK,
            "coordinates drawn alike on all ranks",
            "allreduce",
            feedback=True,
            argument="density",
            examples=("randomk:0.1", "randomk:0.2,scaled=on,ef=off", "randomk:0.2+int8"),
        )
    )
    register(Method("sign", Sign, "one bit and a scale", "twoshot", True, "block", examples=("sign", "sign:64")))
    for bits in range(2, 9):
        examples = (f"int{bits}",) if bits in (3, 4, 8) else ()
        examples += ("int4,stochastic=on,ef=off", "int8,exchange=allgather") if bits == 4 else ()
        fixed = {"bits": bits}
        summary = f"{bits}-bit integers with block scales"
        register(Method(f"int{bits}", BlockInt, summary, "twoshot", True, "block", fixed, examples))
    summary = "8-bit integers between each block's extremes"
    register(Method("affine", AffineInt, summary, "allgather", True, "block", examples=("affine", "affine:256")))
    register(Method("qsgd", QSGD, "stochastic levels of a norm", "twoshot", argument="levels", examples=("qsgd:15",)))
    register(
        Method(
            "powersgd",
            PowerSGD,
            "low rank by subspace iteration",
            "own",
            feedback=True,
            argument="rank",
            examples=("powersgd:1", "powersgd:4"),
        )
    )
    _register_rules()


def _register_rules() -> None:
    """Rules that guard against bad gradients, and other results than a mean."""
    rules = [
        ("median", Median, "median of each coordinate", None, "median"),
        ("trimmed", TrimmedMean, "mean of each coordinate without its extremes", "bad", "trimmed:1"),
        ("krum", Krum, "the gradient with the nearest neighbours", "bad", "krum:1"),
        ("multikrum", MultiKrum, "mean of the gradients with the nearest neighbours", "bad", "multikrum:1"),
        ("bulyan", Bulyan, "Krum's choices, averaged around their median", "bad", "bulyan:1"),
        ("rfa", GeometricMedian, "geometric median", "iterations", "rfa"),
        ("clip", CenteredClipping, "mean of differences to the last result, clipped", "radius", "clip:1"),
        ("adasum", Adasum, "between mean and sum, by angle", None, "adasum"),
        ("dp", PrivateMean, "differentially private mean", "clip", "dp:1"),
    ]
    for name, build, summary, argument, example in rules:
        register(Method(name, build, summary, "own", argument=argument, examples=(example,)))


_register_all()
