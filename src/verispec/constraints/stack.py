"""A deep stack for what recurses: the platform's own may be 8 MiB, 1 MiB or less, and an overflow takes the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")
_NUM_BYTES = 64 << 20  # addresses; what is not used takes no memory
_LOCK = threading.Lock()  # the size holds for all threads that are started meanwhile


def on_deep_stack(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises, on a thread of its own."""
    done = Future[_Result]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="verispec-compiler", daemon=True)
    with _LOCK:
        before = threading.stack_size(_NUM_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()
