"""Work inside a captured graph that runs only if a word on the device is not 0 by then: conditional nodes.

The function that decides is the device runtime's, a library that lies beside CUDA's headers. Where it is not there, or
driver and bindings are too old, work runs in any case: its kernels look at the same word by themselves, which takes
longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from verispec.backends.cuda.arguments import filled, pointers, struct
from verispec.backends.cuda.compiler import CompileError, CudaError, Kernel, checked, compile_cubin, runtime_library

_LEAST_DRIVER, _LEAST_BINDINGS = 12040, 13  # that have conditional nodes, as they are called here
_BranchArgs = struct("BranchArgs", *pointers("busy"), ("handle", ctypes.c_ulonglong))


class Branches:
    """Conditional nodes of graphs that are being captured on the current device."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] | None = None
        self._side: Any = None  # the stream on which bodies are captured
        self.num_begun = self.num_made = 0  # nodes

    def only_if(self, busy: torch.Tensor, work: Callable[[], object]) -> None:
        """Put `work` on the current stream, which must be capturing for the word to count. It must allocate nothing."""
        if not self.are_there or not torch.cuda.is_current_stream_capturing():
            work()
            return
        self.num_begun += 1
        self._put(busy, work)
        self.num_made += 1

    def give_up(self) -> None:
        """Work runs in any case from now on."""
        self._kernels = {}

    def _put(self, busy: torch.Tensor, work: Callable[[], object]) -> None:
        from cuda.bindings import driver

        assert self._kernels is not None
        stream = torch.cuda.current_stream().cuda_stream
        context = checked(driver.cuCtxGetCurrent())
        graph = self._captured(stream)[0]
        handle = checked(driver.cuGraphConditionalHandleCreate(graph, context, 0, driver.CU_GRAPH_COND_ASSIGN_DEFAULT))
        args = filled(_BranchArgs(), busy=busy, handle=int(handle))
        self._kernels["decide"].launch((1, 1, 1), 1, args, stream=stream, ahead=False)
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        condition = params.conditional
        condition.handle, condition.type = handle, driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        condition.size, condition.ctx = 1, context
        _, before, edges = self._captured(stream)
        node = checked(driver.cuGraphAddNode(graph, before, edges, len(before), params))
        body = params.conditional.phGraph_out[0]
        replaces = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        checked(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, int(replaces)))
        self._capture(body, work, stream)
        self._kernels["go_on"].launch((1, 1, 1), 1, args, stream=stream, ahead=False)

    def _capture(self, body: Any, work: Callable[[], object], stream: int) -> None:
        from cuda.bindings import driver

        while self._side is None or self._side.cuda_stream == stream:  # torch has few streams, and gives them again
            self._side = torch.cuda.Stream()
        side = self._side.cuda_stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCaptureToGraph(side, body, None, None, 0, mode))
        try:
            with torch.cuda.stream(self._side):
                work()
        except BaseException:
            driver.cuStreamEndCapture(side)  # whatever it says: the work's own error is what is told
            self._side = None
            raise
        checked(driver.cuStreamEndCapture(side))

    @staticmethod
    def _captured(stream: int) -> tuple[Any, list[Any], list[Any] | None]:
        """The graph that is captured on a stream, and what its next node waits for."""
        from cuda.bindings import driver

        _, _, graph, nodes, edges, count = checked(driver.cuStreamGetCaptureInfo(stream))
        nodes, edges = list(nodes or ())[:count], list(edges or ())[:count]
        return graph, nodes, edges or None

    @property
    def are_there(self) -> bool:
        """Whether this machine has conditional nodes; found out at the first call, which is made before a capture."""
        if self._kernels is None:
            self._kernels = {}
            library = runtime_library()
            if library is not None and _bindings() >= _LEAST_BINDINGS and _driver_version() >= _LEAST_DRIVER:
                with suppress(CudaError, CompileError):  # a library that this driver cannot link
                    self._kernels = _linked(library)
        return bool(self._kernels)


def _bindings() -> int:
    """The major version of cuda-bindings."""
    import cuda.bindings

    return int(cuda.bindings.__version__.partition(".")[0])


def _driver_version() -> int:
    """Of CUDA, as the driver has it."""
    from cuda.bindings import driver

    return int(checked(driver.cuDriverGetVersion()))


def _linked(library: Path) -> dict[str, Kernel]:
    from cuda.bindings import driver

    code = compile_cubin("branch.cu", {}, relocatable=True)
    state = checked(driver.cuLinkCreate(0, [], []))
    kinds = driver.CUjitInputType
    checked(driver.cuLinkAddData(state, kinds.CU_JIT_INPUT_CUBIN, code, len(code), b"branch", 0, [], []))
    checked(driver.cuLinkAddFile(state, kinds.CU_JIT_INPUT_LIBRARY, str(library).encode(), 0, [], []))
    address, size = checked(driver.cuLinkComplete(state))
    module = checked(driver.cuModuleLoadData(ctypes.string_at(int(address), size)))
    checked(driver.cuLinkDestroy(state))
    return {name: Kernel(module, name) for name in ("decide", "go_on")}
