"""As much of Ray as the adapter uses, in this process: actors are objects, and their answers come from threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class Ref(Future[Any]):
    """What an actor's method will have returned."""

    def future(self) -> Future[Any]:
        return self


class Handle:
    """An actor as another one knows it, which asks no more once it is dead itself."""

    def __init__(self, owner: Actor, actor: Actor) -> None:
        self._owner, self._actor = owner, actor

    def __getattr__(self, name: str) -> Any:
        if self._owner.error is not None:
            raise self._owner.error
        return getattr(self._actor, name)


class Actor:
    """An object whose methods are called by `actor.method.remote(...)`."""

    def __init__(self, ray: FakeRay, make: Callable[[], Any]) -> None:
        self._ray, self._open = ray, list[Ref]()
        self.error: Exception | None = None
        try:
            self._made = make()
        except Exception as error:  # what Ray would tell whoever calls a method
            self.error = RayError(f"The actor died\n{type(error).__name__}: {error}")

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Ref:
            return self._call(name, arguments)

        return SimpleNamespace(remote=remote)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Ref:
        ref = Ref()
        self._open.append(ref)
        if self.error is not None:
            ref.set_exception(self.error)
        elif inspect.iscoroutinefunction(getattr(self._made, name)):
            self._ray.begin(lambda: self._later(ref, getattr(self._made, name), arguments))
        else:
            known = [[Handle(self, one) for one in given] for given in arguments]
            self._ray.run(lambda: self._now(ref, getattr(self._made, name), known))
        return ref

    async def _later(self, ref: Ref, method: Any, arguments: Sequence[Any]) -> None:
        try:
            result = await method(*arguments)
        except Exception as error:
            self._end(ref, None, RayError(f"traceback\n{type(error).__name__}: {error}"))
        else:
            self._end(ref, result, None)

    def _now(self, ref: Ref, method: Any, arguments: Sequence[Any]) -> None:
        try:
            result = method(*arguments)
        except Exception as error:
            self._end(ref, None, RayError(f"traceback\n{type(error).__name__}: {error}"))
        else:
            self._end(ref, result, None)

    def _end(self, ref: Ref, result: Any, error: Exception | None) -> None:
        if ref.done():
            return
        if error is None:
            ref.set_result(result)
        else:
            ref.set_exception(error)

    def die(self, error: Exception) -> None:
        """Answer nothing any more."""
        self.error = error
        for ref in self._open:
            self._end(ref, None, error)


class FakeRay:
    """The module."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks, self._threads = set[asyncio.Task[None]](), list[threading.Thread]()
        self.options: list[dict[str, Any]] = []

    def begin(self, make: Callable[[], Any]) -> None:
        """Run a coroutine on the loop."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.add(self._loop.create_task(make())))

    def run(self, what: Callable[[], None]) -> None:
        """Run a function in a thread."""
        self._threads.append(threading.Thread(target=what, daemon=True))
        self._threads[-1].start()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, kind: Callable[..., Any]) -> Any:
        def made(*arguments: Any) -> Actor:
            return Actor(self, lambda: kind(*arguments))

        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=options)

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        return ref.result(timeout)

    def wait(self, refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        done, _ = wait(refs, min(timeout, 0.02), FIRST_EXCEPTION)
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    def kill(self, actor: Actor) -> None:
        actor.die(RayError("The actor was killed"))

    def close(self) -> None:
        """End all, once the actors were killed."""
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a worker goes on after its end"
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
