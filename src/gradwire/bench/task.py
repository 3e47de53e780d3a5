"""The place from which scripts imported `Task` before tasks had a room of their own: `gradwire.tasks`."""

from gradwire.tasks.task import Examples, Task

__all__ = ["Examples", "Task"]
