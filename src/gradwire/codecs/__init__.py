"""One tensor, one payload; one file, one class each."""

from gradwire.codecs.affine_int import AffineInt
from gradwire.codecs.base import Codec
from gradwire.codecs.block_int import BlockInt
from gradwire.codecs.cast import BF16, FP16, Identity, StochasticBF16
from gradwire.codecs.chain import Chain
from gradwire.codecs.dct_topk import DCTTopK
from gradwire.codecs.fp8 import FP8
from gradwire.codecs.hadamard import Hadamard
from gradwire.codecs.natural import Natural
from gradwire.codecs.one_bit import OneBit
from gradwire.codecs.qsgd import QSGD
from gradwire.codecs.randomk import RandomK
from gradwire.codecs.scaled import Scaled
from gradwire.codecs.sign import Sign
from gradwire.codecs.terngrad import TernGrad
from gradwire.codecs.threshold import Threshold
from gradwire.codecs.topk import TopK

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "QSGD",
    "AffineInt",
    "BlockInt",
    "Chain",
    "Codec",
    "DCTTopK",
    "Hadamard",
    "Identity",
    "Natural",
    "OneBit",
    "RandomK",
    "Scaled",
    "Sign",
    "StochasticBF16",
    "TernGrad",
    "Threshold",
    "TopK",
]
