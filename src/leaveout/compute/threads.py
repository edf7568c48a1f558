"""Runs one function on several threads of this process, each using a single PyTorch thread.

Two models of medium size side by side, with one thread each, finish sooner than one after the other with two threads
each: PyTorch's own threads wait for each other at every operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def spread(functions: Sequence[Callable[[A], B]], items: Sequence[A]) -> list[B]:
    """Apply the functions to all items: one thread per function, each taking the next remaining item.

    The functions compute the same and share no mutable state, so it does not matter which one takes which item.

    >>> spread([lambda x: x + 1, lambda x: x + 1], [1, 2, 3])
    [2, 3, 4]
    """
    left = iter(range(len(items)))
    results: dict[int, B] = {}

    def work(function: Callable[[A], B]) -> None:
        torch.set_num_threads(1)  # for this thread; for matrix products, for all threads
        for place in left:
            results[place] = function(items[place])

    threads = torch.get_num_threads()
    try:
        others = [_pool(os.getpid()).submit(work, function) for function in functions[1 : len(items)]]
        work(functions[0])
        for other in others:
            other.result()
    finally:
        torch.set_num_threads(threads)
    return [results[place] for place in range(len(items))]


@lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process; a forked process does not have its parent's threads."""
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="leaveout")
