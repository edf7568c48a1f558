"""Where shards of work are done: in this process, in several on this machine, or on a Ray cluster.

An engine calls one function on many items. The function is sent once to each worker and the items one by one; both by
cloudpickle, from the user's own process to the user's own workers. A worker that dies is replaced, and only its current
item is done again.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch

from leaveout._util.extras import needed_by
from leaveout.errors import EngineError, InputError, is_whole

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRIES = 3
"""How often an item is given to another worker after its worker died."""


class Engine(ABC):
    """Calls a function on every item."""

    elsewhere = True
    """Whether the function runs in other processes than this one."""

    same_disk = True
    """Whether these processes see this machine's files."""

    @abstractmethod
    def run(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """Yield (position, result) of every item, in the order in which they are done."""


@dataclass(frozen=True)
class Local(Engine):
    """Processes on this machine.

    Args:
        processes: how many work side by side; with 1, the default, everything happens in this process.
    """

    processes: int = 1

    def __post_init__(self) -> None:
        if not is_whole(self.processes, 1):
            raise InputError(
                f"Local(processes={self.processes!r}) is not a number of processes: give a whole number of at least 1.",
                code="processes-not-a-count",
            )

    @property
    def elsewhere(self) -> bool:  # type: ignore[override]
        """Say whether the function runs in other processes than this one."""
        return self.processes > 1

    def run(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """Yield (position, result) of every item, in the order in which they are done."""
        if not self.elsewhere:
            yield from ((place, function(item)) for place, item in enumerate(items))
            return
        with needed_by(f"Local({self.processes})"):
            import joblib  # its processes need no guard around the caller's main module, and are reused

        left = dict(enumerate(items))
        with tempfile.TemporaryDirectory(prefix="leaveout-") as folder:
            sent = Path(folder) / "function"
            sent.write_bytes(_packed(function))
            threads, deaths = torch.get_num_threads(), 0
            while left:
                pool = joblib.Parallel(self.processes, return_as="generator_unordered", batch_size=1)
                calls = [joblib.delayed(_call_sent)(str(sent), place, item, threads) for place, item in left.items()]
                try:
                    for place, result in pool(calls):
                        del left[place]
                        deaths = 0
                        yield place, result
                except BrokenProcessPool:
                    # It is not known which of the running items it was. After more deaths than they may have together,
                    # one of them has died too often.
                    deaths += 1
                    if deaths > RETRIES * min(self.processes, len(left)):
                        raise EngineError(_died(RETRIES + 1), code="worker-died") from None


@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster (extra ``ray``); leaveout and what the task imports must be installed on it.

    Args:
        address: where the cluster is, as ``ray.init`` takes it; by default the one in use, the one that RAY_ADDRESS
            names, or a new one on this machine.
        cpus: how many processors each shard of work reserves.
    """

    address: str | None = None
    cpus: float = 1

    same_disk = False

    def __post_init__(self) -> None:
        if isinstance(self.cpus, bool) or not isinstance(self.cpus, Real) or not 0 < self.cpus < math.inf:
            raise InputError(
                f"Ray(cpus={self.cpus!r}) reserves nothing: give a number above 0.", code="cpus-not-positive"
            )

    def run(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """Yield (position, result) of every item, in the order in which they are done."""
        ray = self._connected()
        try:
            yield from self._run(ray, function, items)
        except ray.exceptions.RayError as error:  # a node, its raylet, or the whole cluster was lost
            raise EngineError(
                f"The Ray cluster was lost ({str(error).splitlines()[0]}): start it again and repeat the work; "
                "Resources(work=...) keeps what was finished.",
                code="cluster-lost",
            ) from None

    def _run(self, ray: Any, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        remote = ray.remote(num_cpus=self.cpus, max_retries=RETRIES)(_call_put)
        key, sent = os.urandom(8).hex(), [ray.put(_packed(function))]
        # Submit a few more than can run, so that no worker waits and the object store does not fill up.
        window = 2 + 2 * int(ray.cluster_resources().get("CPU", 1) / self.cpus)
        waiting = list(enumerate(items))[::-1]
        places: dict[Any, int] = {}
        try:
            while waiting or places:
                while waiting and len(places) < window:
                    place, item = waiting.pop()
                    places[remote.remote(key, sent, _packed(item), torch.get_num_threads())] = place
                (future,), _ = ray.wait(list(places))
                yield places.pop(future), _fetched(ray, future)
        finally:
            for reference in places:  # after an error, or if the rest is not wanted
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)

    def _connected(self) -> Any:
        own = self.address is None and "RAY_ADDRESS" not in os.environ
        if own:  # makes Ray's cluster listen on the loopback only; read when Ray is imported
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        ray = _ray()
        if ray.is_initialized():
            return ray
        try:
            _check_listens(self.address or os.environ.get("RAY_ADDRESS"))
            options = {"include_dashboard": False} if own else {"address": self.address}
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = self.address or os.environ.get("RAY_ADDRESS")
            raise EngineError(
                f"No Ray cluster answers at {where} ({error}): start one, or correct it.", code="cluster-not-found"
            ) from None
        return ray


def _check_listens(address: str | None) -> None:
    """Raise ConnectionError if nothing listens at an address of the form host:port; Ray itself tries for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ConnectionError(str(error)) from None


def engine_of(engine: str | Engine) -> Engine:
    """Return an engine by name.

    >>> engine_of("local")
    Local(processes=1)
    """
    if isinstance(engine, Engine):
        return engine
    if engine not in ("local", "ray"):
        raise InputError(
            f"engine={engine!r} is unknown: use 'local', 'ray', lo.Local(processes) or lo.Ray(address).",
            code="engine-unknown",
        )
    return Local() if engine == "local" else Ray()


def _ray() -> Any:
    with needed_by("engine='ray'"):
        import ray
    return ray


def _fetched(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # the function's own error, as it would have been raised here
        raise error.cause from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError):
        raise EngineError(_died(RETRIES + 1), code="worker-died") from None


def _packed(thing: Any) -> bytes:
    with needed_by("Work in other processes"):
        import cloudpickle
    try:
        return cloudpickle.dumps(thing)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise EngineError(
            f"The work cannot be sent to other processes ({error}): keep open files, locks and connections out of the "
            "task's model and data sets, or use engine='local'.",
            code="work-not-sendable",
        ) from None


def _died(times: int) -> str:
    return (
        f"The worker died {times} times on the same work, perhaps for want of memory: give smaller shards with "
        "Resources(shard=...), or fewer workers."
    )


@lru_cache(maxsize=2)
def _read(file: str) -> Callable:
    return pickle.loads(Path(file).read_bytes())  # noqa: S301 - written by the process that started this one


def _call_sent(file: str, place: int, item: Any, threads: int) -> tuple[int, Any]:
    torch.set_num_threads(threads)  # as many as in the calling process: another number would round sums differently
    return place, _read(file)(item)


_PUT: dict[str, Callable] = {}


def _call_put(key: str, sent: list, item: bytes, threads: int) -> Any:
    """Run in a Ray worker, which keeps the function for its next item."""
    if key not in _PUT:
        _PUT.clear()
        _PUT[key] = pickle.loads(_ray().get(sent[0]))  # noqa: S301 - as above
    torch.set_num_threads(threads)  # as many as in the calling process: more would round sums differently
    return _PUT[key](pickle.loads(item))  # noqa: S301 - as above
