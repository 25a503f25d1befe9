"""What becomes of requests when the device fails: memory that ran out ends what was in the air, all else ends all."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext, suppress
from enum import IntEnum
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.backends import test_conformance as conformance  # noqa: E402
from tests.support.cuda_stand_in import StandIn, StandInEvent, StandInGraph  # noqa: E402
from tests.support.tiny_models import TinyConfig, make_tensors  # noqa: E402
from verispec.backends import gpu  # noqa: E402
from verispec.backends.cuda import branches  # noqa: E402
from verispec.backends.cuda import device as devices  # noqa: E402
from verispec.backends.cuda.backend import CudaBackend, CudaModel  # noqa: E402
from verispec.backends.cuda.compiler import CompileError, CudaError  # noqa: E402
from verispec.config import EngineConfig  # noqa: E402
from verispec.engine import Engine, Request  # noqa: E402
from verispec.engine.thread import EngineThread  # noqa: E402
from verispec.errors import BackendDeadError, DeviceMemoryError, InputError  # noqa: E402
from verispec.spec.registry import DRAFTERS, DraftSetup  # noqa: E402
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent  # noqa: E402

pytestmark = pytest.mark.cuda

MEMORY = {
    "torch's own": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "a graph that is made": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
    "a module that is loaded": CudaError("CUDA refused a call with CUDA_ERROR_OUT_OF_MEMORY", is_memory=True),
    "a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
FATAL = {
    "torch's own": torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel"),
    "a launch": CudaError("CUDA refused a call with CUDA_ERROR_ILLEGAL_ADDRESS"),
    "a library": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul`"),
}
TIMEOUT_S = 60


class Failing(StandIn):
    """Fails once, where it is told to, when `fails_at` passes are in the air."""

    def __init__(self, error: Exception | None, *, where: str, fails_at: int) -> None:
        super().__init__()
        self.num_aloft, self.most_aloft = 0, 0
        self._error, self._where, self._fails_at = error, where, fails_at
        self._num_read = 0

    def at(self, where: str) -> None:
        if self._error is not None and (where, self.num_aloft) == (self._where, self._fails_at) and self._num_read > 2:
            error, self._error = self._error, None
            raise error

    def capture(self, work) -> StandInGraph:
        work()

        def replay() -> None:
            self.at("replay")
            work()

        return StandInGraph(replay)

    def event(self) -> StandInEvent:
        device = self

        class Event(StandInEvent):
            def record(self) -> None:
                device.num_aloft += 1
                device.most_aloft = max(device.most_aloft, device.num_aloft)

            def synchronize(self) -> None:
                device.at("read")
                device.num_aloft, device._num_read = device.num_aloft - 1, device._num_read + 1

        return Event()


def requests(count: int) -> list[Request]:
    return [
        Request(conformance.PROMPT[i:][:6], SamplingParams(max_tokens=30, temperature=1.0, seed=i), is_streamed=False)
        for i in range(count)
    ]


def backend_on(device: StandIn) -> CudaBackend:
    config = TinyConfig(context_len=256)
    model = CudaModel(config.architecture, make_tensors(config).__getitem__)
    return CudaBackend([model], device=device, num_slots=200, num_seq_rows=8)


def thread_on(device: StandIn) -> EngineThread:
    """Two run at once, in bursts of which two are in the air."""
    config = EngineConfig(num_slots=200, max_running=2, max_burst=2, depth=2, prefix_cache=False)
    drafters = {"none": DRAFTERS["none"](DraftSetup())}
    return EngineThread(Engine(backend_on(device), family=(1, 4, 16, 64), drafters=drafters, config=config))


class Served:
    """Requests that are given to a thread at once, and how each of them ends."""

    def __init__(self, thread: EngineThread) -> None:
        self._ended: SimpleQueue[SampleOutput] = SimpleQueue()
        self._thread = thread

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.output is not None:
                self._ended.put(event.output)

    def outputs(self, asked: list[Request]) -> dict[int, SampleOutput]:
        """By seed."""
        with self._thread.alone():
            pass
        for request in asked:
            self._thread.submit(request, self)
        found = [self._ended.get(timeout=TIMEOUT_S) for _ in asked]
        return {output.seed: output for output in found}


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """Digests where nothing fails."""
    device = Failing(None, where="", fails_at=0)
    thread = thread_on(device)
    found = Served(thread).outputs(requests(5))
    thread.stop()
    assert device.most_aloft == 2
    assert {output.finish_reason for output in found.values()} == {FinishReason.LENGTH}
    return {seed: output.digest for seed, output in found.items()}


@pytest.mark.parametrize(("where", "fails_at"), [("replay", 1), ("read", 2)])
@pytest.mark.parametrize("error", MEMORY.values(), ids=MEMORY.keys())
def test_memory_that_ran_out_ends_what_was_in_the_air(
    error: Exception, where: str, fails_at: int, expected: dict[int, str]
) -> None:
    """Those who waited are served, and so is who comes later; nothing else is lost."""
    device = Failing(error, where=where, fails_at=fails_at)
    thread = thread_on(device)
    served = Served(thread)
    found = served.outputs(requests(4))
    failed = {seed: output for seed, output in found.items() if output.finish_reason is FinishReason.ERROR}
    assert 1 <= len(failed) <= 2
    assert all("DeviceMemoryError: the GPU's memory ran out in a pass" in str(o.error) for o in failed.values())
    assert {seed: o.digest for seed, o in found.items() if seed not in failed} == {
        seed: digest for seed, digest in expected.items() if seed in found and seed not in failed
    }
    later = served.outputs(requests(5)[4:])
    assert later[4].digest == expected[4]
    thread.engine.check()
    thread.stop()


@pytest.mark.parametrize(("where", "fails_at"), [("replay", 1), ("read", 2)])
@pytest.mark.parametrize("error", FATAL.values(), ids=FATAL.keys())
def test_a_device_that_failed_ends_everything(error: Exception, where: str, fails_at: int) -> None:
    """Whoever runs or waits hears why, and whoever comes later is refused for the same reason."""
    thread = thread_on(Failing(error, where=where, fails_at=fails_at))
    found = Served(thread).outputs(requests(4))
    reason = str(error).split("\n")[0]
    assert {output.finish_reason for output in found.values()} == {FinishReason.ERROR}
    assert {output.error for output in found.values()} == {
        f"the GPU failed and cannot be used by this process any more: {reason}"
    }
    with pytest.raises(BackendDeadError, match="cannot be used by this process any more"):
        thread.submit(requests(1)[0], lambda events: None)
    thread.stop()


@pytest.mark.parametrize("error", [*MEMORY.values(), *FATAL.values()])
def test_a_device_that_failed_is_abandoned(error: Exception) -> None:
    """One whose memory ran out is not."""
    heard: list[int] = []
    with suppress(DeviceMemoryError, BackendDeadError), gpu.Health(lambda: heard.append(1)).guarded():
        raise error
    assert bool(heard) is any(error is each for each in FATAL.values())


def test_memory_that_a_device_copies_from_outlives_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving it back would end the process. A device that works gives back everything in the end."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda count, *, dtype, pin_memory: zeros(count, dtype=dtype))
    for fails in (False, True):
        device = devices.Gpu()
        words = weakref.ref(device.host_words(4))
        assert words() is not None, "the device has it"
        if fails:
            device.abandon()
        del device
        gc.collect()
        assert (words() is not None) is fails


def test_a_pass_that_found_no_memory_leaves_its_lane_to_others() -> None:
    """Or each of them would keep some of the host's memory for ever."""

    class Full(StandIn):
        is_full, num_given = False, 0

        def host_words(self, count: int):
            self.num_given += 1
            return super().host_words(count)

        def capture(self, work) -> StandInGraph:
            if self.is_full:
                raise MEMORY["torch's own"]
            return super().capture(work)

    device = Full()
    served = Served(thread_on(device))
    served.outputs(requests(1))
    device.is_full, before = True, device.num_given
    for _ in range(8):
        found = served.outputs(requests(5))
        assert FinishReason.ERROR in {output.finish_reason for output in found.values()}
    assert device.num_given <= before + 4


def test_captures_take_no_such_memory() -> None:
    """It would be given back behind each."""
    device = StandIn()
    served, asked = thread_on(device), list[int]()
    Served(served).outputs(requests(1))  # lanes have theirs now
    device.host_words = asked.append  # type: ignore[assignment,method-assign]
    found = Served(served).outputs(requests(2))
    assert {output.finish_reason for output in found.values()} == {FinishReason.LENGTH}
    assert not asked
    served.stop()


def test_what_is_not_the_devices_fault_does_not_kill_it() -> None:
    """A mistake of ours, or a kernel that does not compile."""
    health = gpu.Health()
    for error in (RuntimeError("shapes do not match"), CompileError("the CUDA kernels do not compile"), ValueError()):
        with pytest.raises(type(error)), health.guarded():
            raise error
    with health.guarded():
        pass


@pytest.mark.parametrize("error", [*MEMORY.values(), *FATAL.values()])
def test_what_fails_while_a_model_is_loaded_is_one_sentence(error: Exception) -> None:
    class Broken(StandIn):
        def kernels(self, shapes):
            raise error

    is_memory = any(error is each for each in MEMORY.values())
    with pytest.raises(InputError if is_memory else BackendDeadError) as found, gpu.loading(gpu.all_of(200)):
        backend_on(Broken())
    says = "K/V of 200 tokens do not fit into the GPU's memory: lower" if is_memory else "nvidia-smi, then try again"
    assert says in str(found.value)
    assert "\n" not in str(found.value)
    with pytest.raises(CompileError), gpu.loading(""):
        raise CompileError("the CUDA kernels do not compile")


@pytest.mark.parametrize("error", [*MEMORY.values(), *FATAL.values()])
def test_what_fails_while_kernels_are_checked_has_a_type(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known answers and the audit's probes."""
    backend = backend_on(StandIn())
    kind = DeviceMemoryError if any(error is each for each in MEMORY.values()) else BackendDeadError

    def broken(*args: object, **how: object) -> None:
        raise error

    probe = backend.probes()[0]
    monkeypatch.setattr(backend._models[0].kernels, "plain", broken)
    with pytest.raises(kind):
        probe.run(torch.zeros(2, probe.width).numpy())
    monkeypatch.setattr("verispec.backends.cuda.answers.wrong_answers", broken)
    with pytest.raises(kind):
        backend_on(StandIn()).wrong_answers()


class FakeGraph:
    """A capture that cannot be ended once something in it has failed."""

    def __init__(self) -> None:
        self.is_begun = self.is_ended = self.has_failed = self.had_collector = False

    def capture_begin(self, **how: object) -> None:
        self.is_begun, self.had_collector = True, gc.isenabled()

    def capture_end(self) -> None:
        self.is_ended = True
        if self.has_failed:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


class FakeStream:
    def __init__(self, number: int = 0) -> None:
        self.waited_for: list[object] = []
        self.cuda_stream = number

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)


@pytest.mark.parametrize("fails", [True, False])
def test_a_failing_capture_ends_and_tells_its_first_error(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, here, side, runs = FakeGraph(), FakeStream(), FakeStream(), list[int]()
    graph.has_failed = fails
    for name, found in (("Stream", side), ("current_stream", here), ("graph_pool_handle", 0), ("CUDAGraph", graph)):
        monkeypatch.setattr(devices.torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(devices.torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(devices, "undivided_products", nullcontext)

    def work() -> None:
        runs.append(1)
        if fails and len(runs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    device = devices.Gpu()
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            device.capture(work)
    else:
        assert device.capture(work) is graph
    assert graph.is_ended
    assert not graph.had_collector
    assert gc.isenabled()
    assert here.waited_for == [side], "what ran before the capture may still write"


def test_the_collector_starts_again_when_the_last_is_outside() -> None:
    first, second = devices._no_garbage, devices._no_garbage
    with first:
        with second:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


class Answer(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeNodes:
    """A driver with conditional nodes, of which one call gives `answer`; and a torch that captures what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: str, answer: Answer) -> None:
        self.graphs: list[FakeGraph] = []
        self.bodies: list[int] = []  # streams
        self._streams = iter([9, 9, 8])  # of which torch gives one again
        params = SimpleNamespace(type=None, conditional=SimpleNamespace(phGraph_out=["body"]))
        driver = SimpleNamespace(
            CU_GRAPH_COND_ASSIGN_DEFAULT=1, CUgraphNodeParams=lambda: params,
            CUgraphNodeType=SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL=1),
            CUgraphConditionalNodeType=SimpleNamespace(CU_GRAPH_COND_TYPE_IF=0),
            CUstreamUpdateCaptureDependencies_flags=SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1),
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1),
        )  # fmt: skip
        calls = {
            "cuCtxGetCurrent": ("context",), "cuStreamGetCaptureInfo": (1, 0, "graph", [], [], 0),
            "cuGraphConditionalHandleCreate": (5,), "cuGraphAddNode": ("node",),
            "cuStreamUpdateCaptureDependencies": (), "cuStreamBeginCaptureToGraph": (), "cuStreamEndCapture": (),
        }  # fmt: skip
        for name, values in calls.items():
            result = (answer,) if name == fails else (Answer.CUDA_SUCCESS, *values)
            setattr(driver, name, lambda *args, name=name, result=result: self._called(name, args) or result)
        bindings = ModuleType("cuda.bindings")
        bindings.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        for name, found in (("runtime_library", 1), ("_bindings", 13), ("_driver_version", 13000)):
            monkeypatch.setattr(branches, name, lambda found=found: found)
        kernel = SimpleNamespace(launch=lambda *args, **how: None)
        monkeypatch.setattr(branches, "_linked", lambda library: {"decide": kernel, "go_on": kernel})
        monkeypatch.setattr(branches, "filled", lambda *args, **values: None)
        monkeypatch.setattr(devices, "undivided_products", nullcontext)
        fakes = {
            "Stream": lambda: FakeStream(next(self._streams)), "current_stream": lambda: FakeStream(9),
            "graph_pool_handle": object, "CUDAGraph": self._graph, "stream": lambda stream: nullcontext(),
            "is_current_stream_capturing": lambda: self.graphs[-1].is_begun and not self.graphs[-1].is_ended,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(devices.torch.cuda, name, fake)

    def _called(self, name: str, args: tuple[object, ...]) -> None:
        if name == "cuStreamBeginCaptureToGraph":
            self.bodies.append(args[0])

    def _graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]


def test_a_body_is_captured_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device, runs = FakeNodes(monkeypatch, fails="", answer=Answer.CUDA_SUCCESS), devices.Gpu(), list[int]()
    device.capture(lambda: device.only_if(torch.zeros(1), lambda: runs.append(1)))
    assert (len(fake.graphs), device.num_branches, fake.bodies, len(runs)) == (1, 1, [8], 2)


@pytest.mark.parametrize("fails", ["cuGraphConditionalHandleCreate", "cuGraphAddNode", "cuStreamEndCapture"])
def test_a_machine_that_refuses_a_conditional_node_does_without(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on; memory that ran out is another matter."""
    fake, runs = FakeNodes(monkeypatch, fails=fails, answer=Answer.CUDA_ERROR_NOT_SUPPORTED), list[int]()
    device = devices.Gpu()

    def work() -> None:
        device.only_if(torch.zeros(1), lambda: runs.append(1))

    assert device.capture(work) is fake.graphs[1]
    assert all(graph.is_ended for graph in fake.graphs)
    assert (len(fake.graphs), device.num_branches) == (2, 0)
    assert device.capture(work) is fake.graphs[2]
    fake = FakeNodes(monkeypatch, fails=fails, answer=Answer.CUDA_ERROR_OUT_OF_MEMORY)
    device = devices.Gpu()
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        device.capture(work)
    assert len(fake.graphs) == 1


def test_what_fails_without_a_conditional_node_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device, runs = FakeNodes(monkeypatch, fails="", answer=Answer.CUDA_SUCCESS), devices.Gpu(), list[int]()

    def work() -> None:
        runs.append(1)
        if len(runs) == 2:
            raise FATAL["a launch"]

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        device.capture(work)
    assert (len(fake.graphs), len(runs)) == (1, 2)
