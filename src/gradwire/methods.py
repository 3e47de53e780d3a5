"""Every method gradwire offers, one line each."""

from __future__ import annotations

from gradwire.codecs import (
    BF16,
    FP8,
    FP16,
    QSGD,
    AffineInt,
    BlockInt,
    DCTTopK,
    Hadamard,
    Identity,
    Natural,
    OneBit,
    RandomK,
    Sign,
    StochasticBF16,
    TernGrad,
    Threshold,
    TopK,
)
from gradwire.core.registry import Method, methods, register
from gradwire.reducers import (
    DGC,
    SVD,
    AdaptiveThreshold,
    CountSketch,
    GradZip,
    MajorityVote,
    PowerSGD,
    ScaledFP16,
    Sketch,
    TernarySum,
)

__all__ = ["methods", "register"]

ROUTES = tuple(f"none,exchange={route}" for route in ("direct", "ring", "tree", "rhd"))


def _register_all() -> None:
    register(Method("none", Identity, "uncompressed", "allreduce", examples=("none", *ROUTES)))
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
            examples=(
                "topk:0.01",
                "topk:0.3,values=bf16",
                "topk:0.05+int8",
                "topk:0.1+qsgd:15,ef=off",
                "topk:0.02,exchange=twoshot",
            ),
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
    summary = "magnitudes above a fixed one"
    register(Method("threshold", Threshold, summary, "allgather", True, "tau", examples=("threshold:1.5,cap=0.8",)))
    summary = "magnitudes above a quantile that is followed"
    examples = ("adaptive_threshold:0.05",)
    register(Method("adaptive_threshold", AdaptiveThreshold, summary, "own", True, "density", examples=examples))
    summary = "top-k of accumulated momentum"
    register(Method("dgc", DGC, summary, "own", argument="density", examples=("dgc:0.05,ramp=2,clip=2",)))
    register(Method("sign", Sign, "one bit and a scale", "twoshot", True, "block", examples=("sign", "sign:64")))
    for bits in range(2, 9):
        examples = (f"int{bits}",) if bits in (3, 4, 8) else ()
        examples += ("int4,stochastic=on,ef=off", "int8,exchange=allgather", "int4,node=2") if bits == 4 else ()
        fixed = {"bits": bits}
        summary = f"{bits}-bit integers with block scales"
        register(Method(f"int{bits}", BlockInt, summary, "twoshot", True, "block", fixed, examples))
    summary = "8-bit integers between each block's extremes"
    register(Method("affine", AffineInt, summary, "allgather", True, "block", examples=("affine", "affine:256")))
    register(
        Method(
            "qsgd",
            QSGD,
            "stochastic levels of a norm",
            "twoshot",
            argument="levels",
            examples=("qsgd:15", "qsgd:3,ef=on"),
        )
    )
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
    register(Method("gradzip", GradZip, "low rank by least squares", "own", True, "rank", examples=("gradzip:2",)))
    register(Method("svd", SVD, "best low rank, for reference", "own", True, "rank", examples=("svd:2",)))
    register(Method("sketch", Sketch, "random directions of matrices", "own", True, "rank", examples=("sketch:8",)))
    summary = "largest of the mean, found in a sum of sketches"
    register(Method("countsketch", CountSketch, summary, "own", True, "density", examples=("countsketch:0.05",)))
    summary = "largest coefficients of cosine transforms"
    register(
        Method("dct_topk", DCTTopK, summary, "allgather", True, "density", examples=("dct_topk:0.0625,residual=bf16",))
    )
    summary = "random directions of flat tensors"
    register(Method("hadamard", Hadamard, summary, "allreduce", True, "density", examples=("hadamard:0.125",)))
    _register_quantisers()


def _register_quantisers() -> None:
    summary = "8-bit floats with block scales"
    register(Method("fp8", FP8, summary, "twoshot", True, "format", examples=("fp8", "fp8:e5m2")))
    register(Method("fp16_scaled", ScaledFP16, "fp16 in the range that is needed", "own", examples=("fp16_scaled",)))
    summary = "bfloat16, rounded at random"
    register(Method("bf16_stochastic", StochasticBF16, summary, "twoshot", examples=("bf16_stochastic",)))
    register(Method("natural", Natural, "random powers of two", "twoshot", examples=("natural",)))
    examples = ("terngrad", "terngrad:0,block=40,digits=4")
    register(Method("terngrad", TernGrad, "random ternary digits", "twoshot", argument="clip", examples=examples))
    summary = "ternary digits of a shared scale"
    register(Method("terngrad_sum", TernarySum, summary, "own", argument="clip", examples=("terngrad_sum",)))
    summary = "one bit and a mean on either side of zero"
    register(Method("onebit", OneBit, summary, "twoshot", True, "block", examples=("onebit",)))
    summary = "majority of signs"
    register(Method("signsgd_mv", MajorityVote, summary, "own", argument="block", examples=("signsgd_mv",)))


_register_all()
