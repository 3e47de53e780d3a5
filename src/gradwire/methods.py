"""Every method gradwire offers, one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.advice import ADVICE
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
from gradwire.core.registry import Method, advise, methods, register
from gradwire.reducers import (
    ACPSGD,
    DGC,
    SVD,
    AdaptivePrecision,
    AdaptiveThreshold,
    CountSketch,
    GradZip,
    MajorityVote,
    PowerSGD,
    ScaledFP16,
    Sketch,
    TernarySum,
)
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

_ROUTES = tuple(f"none,exchange={route}" for route in ("direct", "ring", "tree", "rhd"))
_TOPK = (
    *("topk:0.01", "topk:0.3,values=bf16", "topk:0.05+int8", "topk:0.1+qsgd:15,ef=off", "topk:0.02,exchange=twoshot"),
    *("topk:0.1,ef=ef21", "topk:0.1,residual=factored:2", "topk:0.05,worker_momentum=0.9"),
)
_RANDOMK = ("randomk:0.1", "randomk:0.2,scaled=on,ef=off", "randomk:0.2+int8")
_INTEGER_SYNONYMS = {4: ("fp4", "nf4", "mxfp4"), 8: ("int", "integer", "quantize", "quantization", "blockint")}
_TERNGRAD = ("terngrad", "terngrad:0,block=40,digits=4")


def _integers(bits: int, *examples: str) -> Method:
    """One width of `BlockInt`."""
    summary = f"{bits}-bit integers with block scales"
    synonyms = (f"{bits}bit", f"{bits}bits", f"uint{bits}", f"q{bits}", f"i{bits}", *_INTEGER_SYNONYMS.get(bits, ()))
    return Method(f"int{bits}", BlockInt, summary, "twoshot", True, "block", {"bits": bits}, examples, synonyms)


def _rule(
    name: str,
    build: Callable[..., Any],
    summary: str,
    argument: str | None,
    *examples: str,
    synonyms: tuple[str, ...] = (),
) -> Method:
    """A rule for what the gradients of all ranks become."""
    return Method(name, build, summary, "own", argument=argument, examples=examples, synonyms=synonyms)


# name, what builds it, summary, exchange, error feedback, what follows the colon, examples
_METHODS = (
    # dense
    Method(
        *("none", Identity, "uncompressed", "allreduce"),
        examples=("none", *_ROUTES),
        synonyms=(
            "fp32",
            "float32",
            "float",
            "32bit",
            "fp64",
            "float64",
            "allreduce",
            "identity",
            "uncompressed",
            "mean",
        ),
    ),
    Method(
        *("fp16", FP16, "cast to half precision", "allreduce"),
        examples=("fp16",),
        synonyms=("float16", "half", "16bit", "16bits", "f16"),
    ),
    Method(
        *("fp16_scaled", ScaledFP16, "fp16 in the range that is needed", "own"),
        examples=("fp16_scaled",),
        synonyms=("scaled", "scaled_fp16"),
    ),
    Method(
        *("adaptive", AdaptivePrecision, "fp16 where the range fits it, else more", "own"),
        argument="wide",
        examples=("adaptive", "adaptive:bf16"),
        synonyms=("mixed", "mixed_precision", "amp"),
    ),
    Method(
        *("bf16", BF16, "cast to bfloat16", "allreduce"),
        examples=("bf16",),
        synonyms=("bfloat16", "bfloat", "brain_float"),
    ),
    Method(
        *("bf16_stochastic", StochasticBF16, "bfloat16, rounded at random", "twoshot"),
        examples=("bf16_stochastic",),
        synonyms=("stochastic_rounding", "stochastic"),
    ),
    # sparse
    Method(
        *("topk", TopK, "largest magnitudes", "allgather", True, "density"),
        examples=_TOPK,
        synonyms=("sparse", "sparsify", "sparsification", "largest", "gtopk", "gradient_dropping"),
    ),
    Method(
        "randomk",
        RandomK,
        "one of each run of neighbours, drawn alike",
        "allreduce",
        True,
        "density",
        examples=_RANDOMK,
        synonyms=("randk", "rand", "random", "random_sparsification"),
    ),
    Method(
        *("threshold", Threshold, "magnitudes above a fixed one", "allgather", True, "tau"),
        examples=("threshold:1.5,cap=0.8",),
        synonyms=("hard_threshold", "tau", "cutoff"),
    ),
    Method(
        *("adaptive_threshold", AdaptiveThreshold, "magnitudes above a quantile that is followed", "own"),
        *(True, "density"),
        examples=("adaptive_threshold:0.05",),
        synonyms=("quantile", "sampled_topk", "redsync", "sidco"),
    ),
    Method(
        *("dgc", DGC, "top-k of momentum", "own"),
        argument="density",
        examples=("dgc:0.05,ramp=2,clip=2",),
        synonyms=("deep_gradient_compression", "momentum_correction"),
    ),
    # quantised
    Method(
        *("sign", Sign, "one bit and a scale", "twoshot", True, "block"),
        examples=("sign", "sign:64"),
        synonyms=("signsgd", "efsignsgd", "scaled_sign", "1bit", "binary"),
    ),
    Method(
        *("onebit", OneBit, "one bit and a mean on either side of zero", "twoshot", True, "block"),
        examples=("onebit",),
        synonyms=("1bit_sgd", "onebit_sgd", "1bit_adam", "onebit_adam", "1bit_lamb"),
    ),
    Method(
        *("signsgd_mv", MajorityVote, "majority of signs", "own"),
        argument="block",
        examples=("signsgd_mv",),
        synonyms=("majority", "majority_vote", "vote", "signum"),
    ),
    Method(
        *("terngrad", TernGrad, "random ternary digits", "twoshot"),
        argument="clip",
        examples=_TERNGRAD,
        synonyms=("ternary", "trinary", "tern"),
    ),
    Method(
        *("terngrad_sum", TernarySum, "the same, summed exactly", "own"),
        argument="clip",
        examples=("terngrad_sum",),
        synonyms=("ternary_sum",),
    ),
    _integers(2),
    _integers(3, "int3"),
    _integers(4, "int4", "int4,stochastic=on,ef=off", "int8,exchange=allgather", "int4,node=2"),
    _integers(5),
    _integers(6),
    _integers(7),
    _integers(8, "int8"),
    Method(
        *("affine", AffineInt, "8-bit integers between each block's extremes", "allgather", True, "block"),
        examples=("affine", "affine:256"),
        synonyms=("minmax", "per_tensor", "per_channel", "asymmetric"),
    ),
    Method(
        *("fp8", FP8, "8-bit floats with block scales", "twoshot", True, "format"),
        examples=("fp8", "fp8:e5m2"),
        synonyms=("float8", "f8", "mxfp8", "e4m3", "e5m2"),
    ),
    Method(
        *("natural", Natural, "random powers of two", "twoshot"),
        examples=("natural",),
        synonyms=("natural_compression", "cnat", "power_of_two", "powers_of_two"),
    ),
    Method(
        *("qsgd", QSGD, "stochastic levels of a norm", "twoshot", False, "levels"),
        examples=("qsgd:15", "qsgd:3,ef=on"),
        synonyms=("stochastic_quantization", "random_quantization", "dithering"),
    ),
    # low rank, sketches and transforms
    Method(
        *("powersgd", PowerSGD, "low rank by subspace iteration", "own", True, "rank"),
        examples=("powersgd:1", "powersgd:4", "powersgd:2,factors=fp16", "powersgd:4,factors=int8"),
        synonyms=("low_rank", "lora", "power_iteration", "subspace_iteration"),
    ),
    Method(
        *("acpsgd", ACPSGD, "one factor of low rank a step, in turn", "own", True, "rank"),
        examples=("acpsgd:2", "acpsgd:4,factors=fp16"),
        synonyms=("acp", "alternate_compressed_powersgd", "alternating_powersgd"),
    ),
    Method(
        *("gradzip", GradZip, "low rank by least squares", "own", True, "rank"),
        examples=("gradzip:2",),
        synonyms=("als", "least_squares", "alternating_least_squares"),
    ),
    Method(
        *("svd", SVD, "best low rank, for reference", "own", True, "rank"),
        examples=("svd:2",),
        synonyms=("atomo", "spectral", "truncated_svd"),
    ),
    Method(
        *("sketch", Sketch, "random directions of matrices", "own", True, "rank"),
        examples=("sketch:8",),
        synonyms=("random_projection", "projection"),
    ),
    Method(
        *("hadamard", Hadamard, "random directions of flat tensors", "allreduce", True, "density"),
        examples=("hadamard:0.125",),
        synonyms=("walsh_hadamard", "fwht", "srht"),
    ),
    Method(
        *("countsketch", CountSketch, "largest of the mean, found in a sum of sketches", "own", True, "density"),
        examples=("countsketch:0.05",),
        synonyms=("sketched_sgd", "fetchsgd", "heavy_hitters"),
    ),
    Method(
        *("dct_topk", DCTTopK, "largest coefficients of cosine transforms", "allgather", True, "density"),
        examples=("dct_topk:0.0625,residual=bf16",),
        synonyms=("dct", "cosine", "fft", "demo"),
    ),
    # rules that guard against bad gradients, and other results than a mean
    _rule("median", Median, "median of each coordinate", None, "median", synonyms=("coordinate_median", "comed")),
    _rule(
        *("trimmed", TrimmedMean, "mean of each coordinate without its extremes", "bad", "trimmed:1"),
        synonyms=("trimmed_mean", "trim"),
    ),
    _rule(
        *("krum", Krum, "the gradient with the nearest neighbours", "bad", "krum:1", "krum:1,worker_momentum=0.5"),
        synonyms=("byzantine", "robust"),
    ),
    _rule("multikrum", MultiKrum, "mean of the gradients with the nearest neighbours", "bad", "multikrum:1"),
    _rule("bulyan", Bulyan, "Krum's choices, averaged around their median", "bad", "bulyan:1"),
    _rule(
        *("rfa", GeometricMedian, "geometric median", "iterations", "rfa"),
        synonyms=("geometric_median", "geomed", "weiszfeld"),
    ),
    _rule(
        *("clip", CenteredClipping, "mean of differences to the last result, clipped", "radius", "clip:1"),
        synonyms=("centered_clipping", "centred_clipping", "cclip", "clipping"),
    ),
    _rule("adasum", Adasum, "between mean and sum, by angle", None, "adasum", synonyms=("adaptive_sum",)),
    _rule(
        *("dp", PrivateMean, "differentially private mean", "clip", "dp:1"),
        synonyms=("dp_sgd", "private", "privacy", "differential_privacy", "opacus"),
    ),
)

for _method in _METHODS:
    register(_method)
for _advice, _names in ADVICE.items():
    advise(_advice, *_names.split())
