"""Where a step of training goes: spans of all ranks on one clock, what each wait was caused by, a table and a trace."""

from gradwire.profiling.account import Account, RankShares, account
from gradwire.profiling.recording import Profile, profile
from gradwire.profiling.records import ClockReading, ProfileError, RankRecord, StepRecord, TensorRecord, read_records
from gradwire.profiling.scalars import ScalarWriter, write_scalars
from gradwire.profiling.summary import summary
from gradwire.profiling.tensors import TensorShares, by_method
from gradwire.profiling.torch_account import TorchAccount, TorchShares, torch_account, torch_summary
from gradwire.profiling.torch_trace import TorchTrace, read_torch_traces
from gradwire.profiling.trace import chrome_trace, write_chrome_trace

__all__ = [
    "Account",
    "ClockReading",
    "Profile",
    "ProfileError",
    "RankRecord",
    "RankShares",
    "ScalarWriter",
    "StepRecord",
    "TensorRecord",
    "TensorShares",
    "TorchAccount",
    "TorchShares",
    "TorchTrace",
    "account",
    "by_method",
    "chrome_trace",
    "profile",
    "read_records",
    "read_torch_traces",
    "summary",
    "torch_account",
    "torch_summary",
    "write_chrome_trace",
    "write_scalars",
]
