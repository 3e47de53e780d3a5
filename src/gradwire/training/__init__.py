"""One configuration for all axes of a mesh: data, tensor, pipeline, context and expert parallelism together.

    trainer = MeshTrainer(read_configuration("together.toml"))
    for _ in range(trainer.configuration.steps.count):
        print(trainer.step())
    save_training(trainer, "saves")

| name | what it is |
|---|---|
| `read_configuration`, `configuration_of` | make a configuration of a TOML file, or of tables |
| `TrainingConfiguration` | what is trained on which ranks |
| `GPTShape`, `TextBatches`, `TrainingSteps` | its model, its data and its steps |
| `DataAxis`, `TensorAxis`, `PipelineAxis`, `ContextAxis`, `ExpertAxis` | its axes |
| `MeshTrainer`, `StepFigures` | trains, and what a step found |
| `save_training`, `load_training` | saves that another layout can load |
| `TrainingMesh` | the `DeviceMesh` and its groups |
"""

from gradwire.training.checkpoint import load_training, save_training
from gradwire.training.configuration import (
    ConfigurationError,
    ContextAxis,
    DataAxis,
    ExpertAxis,
    GPTShape,
    PipelineAxis,
    TensorAxis,
    TextBatches,
    TrainingConfiguration,
    TrainingSteps,
)
from gradwire.training.mesh import TrainingMesh
from gradwire.training.reading import configuration_of, read_configuration
from gradwire.training.trainer import MeshTrainer, StepFigures

__all__ = [
    "ConfigurationError",
    "ContextAxis",
    "DataAxis",
    "ExpertAxis",
    "GPTShape",
    "MeshTrainer",
    "PipelineAxis",
    "StepFigures",
    "TensorAxis",
    "TextBatches",
    "TrainingConfiguration",
    "TrainingMesh",
    "TrainingSteps",
    "configuration_of",
    "load_training",
    "read_configuration",
    "save_training",
]
