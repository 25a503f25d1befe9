"""Threads that share out work whose parts do not touch each other. Which thread does a part changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise


class Workers:
    """A fixed set of threads; the caller's own is one of them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "verispec") if num_threads > 1 else None

    def share(self, count: int, work: Callable[[int, int], None]) -> None:
        """Call `work(start, end)` over ranges that cover `count` items, none of them empty, and wait for all."""
        if self._pool is None or count < 2:
            if count:
                work(0, count)
            return
        parts = min(self.num_threads, count)
        (first_start, first_end), *others = pairwise(count * i // parts for i in range(parts + 1))
        waiting = [self._pool.submit(work, start, end) for start, end in others]
        try:
            work(first_start, first_end)
        finally:
            for part in waiting:
                part.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
