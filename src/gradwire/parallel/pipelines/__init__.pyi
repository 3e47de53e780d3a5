from .bubble import bubble
from .codecs import StageCodecs
from .pipeline import BubbleWarning, Pipeline
from .sample_memory import SampleMemory
from .schedules import SCHEDULES, ScheduleShape
from .stage import CompressedStage
from .timeline import PassTimes, WorkTimeline, computed_timeline

__all__ = [
    "SCHEDULES",
    "BubbleWarning",
    "CompressedStage",
    "PassTimes",
    "Pipeline",
    "SampleMemory",
    "ScheduleShape",
    "StageCodecs",
    "WorkTimeline",
    "bubble",
    "computed_timeline",
]
