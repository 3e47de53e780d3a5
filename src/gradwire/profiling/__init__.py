"""Where a step of training goes: spans of all ranks on one clock, what each wait was caused by, a table and a trace."""

from gradwire.profiling.account import Account, RankShares, account
from gradwire.profiling.recording import Profile, profile
from gradwire.profiling.records import ClockReading, ProfileError, RankRecord, StepRecord, read_records
from gradwire.profiling.summary import summary
from gradwire.profiling.trace import chrome_trace, write_chrome_trace

__all__ = [
    "Account",
    "ClockReading",
    "Profile",
    "ProfileError",
    "RankRecord",
    "RankShares",
    "StepRecord",
    "account",
    "chrome_trace",
    "profile",
    "read_records",
    "summary",
    "write_chrome_trace",
]
