"""What is trained where methods are compared: a model, its data, a loss, and a metric on data that was held out."""

from gradwire.tasks.task import Examples, Task

__all__ = ["Examples", "Task"]
