"""Pipelines of PyTorch whose activations and gradients travel by codecs, and schedules to look at before.

| name | what it is |
|---|---|
| `Pipeline` | the stages of this rank and PyTorch's schedule for them, checked on all ranks |
| `CompressedStage` | a `PipelineStage` that sends payloads |
| `StageCodecs` | the codecs of activations and of their gradients |
| `SampleMemory` | activations as changes of each sample |
| `SCHEDULES`, `ScheduleShape` | the schedules that PyTorch has, and one of them for some ranks and micro-batches |
| `computed_timeline`, `PassTimes`, `WorkTimeline` | when each rank does what |
| `bubble` | the formula of waiting |
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
