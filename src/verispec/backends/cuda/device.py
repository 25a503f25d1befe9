"""Where tensors live and kernels run: a GPU. The tests put a CPU in its place, with the same methods."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from verispec.backends.cuda.branches import Branches
from verispec.backends.cuda.compiler import Cubins
from verispec.backends.cuda.drawing import DrawKernels
from verispec.backends.cuda.kernels import Kernels, undivided_products
from verispec.backends.cuda.shapes import Shapes
from verispec.backends.cuda.steps import StepKernels
from verispec.backends.gpu import is_fault


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A point of the stream."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """What the backend asks of the machine it runs on."""

    @property
    def name(self) -> str:
        """As torch names it."""

    @property
    def leaves_out(self) -> bool:
        """Whether captured work inside of `only_if` that is not wanted does not run at all."""

    def kernels(self, shapes: Shapes) -> Any: ...
    def draws(self, vocab_size: int, rows: int) -> Any: ...
    def steps(self) -> Any: ...
    def capture(self, work: Callable[[], object]) -> Graph: ...
    def only_if(self, busy: torch.Tensor, work: Callable[[], object]) -> None: ...
    def host_words(self, count: int) -> torch.Tensor: ...
    def abandon(self) -> None:
        """It failed, and cannot be used any more."""

    def event(self) -> Event: ...
    def current(self) -> AbstractContextManager[object]: ...
    def exact_products(self) -> AbstractContextManager[object]: ...
    def describe(self) -> dict[str, str]: ...


@contextmanager
def _ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` in any case. Where the block failed that may fail, too, and the block's own error is what is told."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            end()
        raise
    end()


class _NoGarbage:
    """Nothing is collected inside: what an old backend gives back to the driver would end a capture. Threads may be
    inside at once."""

    def __init__(self) -> None:
        self._lock, self._inside, self._was_on = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_on:
                gc.enable()


_no_garbage = _NoGarbage()  # the collector is the process's


class Gpu:
    """One CUDA device. Compiled kernels are kept in `cache_folder`; `compiling` hears of those that are not there."""

    def __init__(
        self, index: int = 0, cache_folder: Path | None = None, compiling: Callable[[], object] = lambda: None
    ) -> None:
        self._index = index
        self._cubins = Cubins(cache_folder, compiling)
        self.name = f"cuda:{index}"
        self._branches = Branches()
        self._side: Any = None  # the stream and the memory of captures, made when first needed
        self._pool: Any = None
        self._first: Any = None  # kept, because the memory of captures ends with the last graph that uses it
        self._failed: list[Any] = []  # graphs that torch may still ask whether they are being captured
        self._pinned: list[torch.Tensor] = []  # all that were given, until the device ends

    @property
    def leaves_out(self) -> bool:
        """Whether it has conditional nodes. The first time they are linked for that, which needs a context."""
        return self._branches.are_there

    def kernels(self, shapes: Shapes) -> Kernels:
        """Those of a model's passes."""
        return Kernels(shapes, self._cubins)

    def draws(self, vocab_size: int, rows: int) -> DrawKernels:
        """Those of the draw."""
        return DrawKernels(vocab_size, rows, self._cubins, self.name)

    def steps(self) -> StepKernels:
        """Those at both ends of a round."""
        return StepKernels(self._cubins)

    def capture(self, work: Callable[[], object]) -> Graph:
        """A graph of what `work` launches. It runs once before, so that everything is compiled and loaded.

        Where a capture with conditional nodes fails, there are none from then on, and it is made once more.
        """
        num_begun = self._branches.num_begun
        try:
            return self._captured(work)
        except RuntimeError as error:
            if self._branches.num_begun == num_begun or not is_fault(error):
                raise
            self._branches.give_up()
            return self._captured(work)

    def _captured(self, work: Callable[[], object]) -> Graph:
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream()
        graph: Any = torch.cuda.CUDAGraph()
        self._side.wait_stream(here)
        with _ended_by(lambda: here.wait_stream(self._side)), undivided_products(), torch.cuda.stream(self._side):
            work()
            try:
                with _no_garbage:
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    with _ended_by(graph.capture_end):
                        work()
            except RuntimeError as error:
                if is_fault(error):  # it may not have ended: torch then takes its memory to be in use
                    self._failed.append(graph)
                    self._pool = torch.cuda.graph_pool_handle()
                raise
        self._first = self._first or graph
        captured: Graph = graph
        return captured

    def only_if(self, busy: torch.Tensor, work: Callable[[], object]) -> None:
        """Put `work` on the stream; in a captured graph it runs only if the word is not 0 by then, or else by kernels
        that see to that themselves. It must allocate nothing."""
        self._branches.only_if(busy, work)

    @property
    def num_branches(self) -> int:
        """Conditional nodes in the graphs captured so far."""
        return self._branches.num_made

    def host_words(self, count: int) -> torch.Tensor:
        """Memory of the host that copies need not wait for. It stays until the device ends: see `abandon`."""
        self._pinned.append(torch.zeros(count, dtype=torch.int32, pin_memory=True))
        return self._pinned[-1]

    def abandon(self) -> None:
        """It failed: nothing of the host's memory that it may copy from or to is ever given back. Torch asks the device
        when it may be, and where that fails it ends the process."""
        for words in self._pinned:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(words))

    def event(self) -> Event:
        """A new one."""
        event: Event = torch.cuda.Event()
        return event

    def current(self) -> AbstractContextManager[object]:
        """Makes it the thread's device."""
        here: AbstractContextManager[object] = torch.cuda.device(self._index)
        return here

    def exact_products(self) -> AbstractContextManager[object]:
        """For products outside of captured work."""
        return undivided_products()

    def describe(self) -> dict[str, str]:
        """What speed depends on."""
        return {"gpu": torch.cuda.get_device_name(self._index), "torch": torch.__version__}
