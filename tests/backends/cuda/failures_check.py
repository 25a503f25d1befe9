"""What becomes of a real GPU's failures: an illegal access ends everything, memory that ran out ends one pass. Needs
torch, numpy and the package.

python -m tests.backends.cuda.failures_check runs each case in a process of its own, because a GPU that failed is lost
to its process, and prints one line per check; what differs must be 0 except in the controls.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue

from tests.backends.cuda.backend_check import FAILED, PROMPT, Driven, make, report
from verispec.backends.cuda.backend import CudaBackend
from verispec.backends.protocol import Pass, PassResult, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.thread import EngineThread
from verispec.errors import BackendDeadError, DeviceMemoryError
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent

DEAD = "the GPU failed and cannot be used by this process any more: "
PLAIN, PENALTIES = 1, 5  # numbers of parameters
WILD = (2**31 - 1, 2**30, -(2**30), -(2**31))  # slots, of which none is anybody's memory
NUM_REQUESTS, BREAKS_AT = 5, 4  # passes
TIMEOUT_S = 120


# An illegal access


class Breakable:
    """A thread that serves with two running, in bursts of which two are in the air; and how requests end."""

    def __init__(self, backend: CudaBackend, break_it: Callable[[CudaBackend], None]) -> None:
        self.backend, self._submit, self._break_it = backend, backend.submit, break_it
        self._left = 0  # passes until it breaks; 0: it does not
        backend.submit = self.submit  # type: ignore[method-assign]
        config = EngineConfig(num_slots=400, max_running=2, max_burst=2, depth=2, prefix_cache=False)
        drafters = {"none": DRAFTERS["none"](DraftSetup())}
        self.thread = EngineThread(Engine(backend, family=backend.shapes, drafters=drafters, config=config))
        self._ended: SimpleQueue[SampleOutput] = SimpleQueue()

    def submit(self, pass_: Pass) -> Ticket:
        if self._left == 1:
            self._break_it(self.backend)
        self._left = max(0, self._left - 1)
        return self._submit(pass_)

    def _heard(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.output is not None:
                self._ended.put(event.output)

    def outputs(self, *, breaks_at: int = 0) -> list[SampleOutput]:
        with self.thread.alone():
            self._left = breaks_at
        for i in range(NUM_REQUESTS):
            self.thread.submit(request(i), self._heard)
        return [self._ended.get(timeout=TIMEOUT_S) for _ in range(NUM_REQUESTS)]


def request(i: int) -> Request:
    return Request(PROMPT[i:][:6], SamplingParams(max_tokens=30, temperature=1.0, seed=i), is_streamed=False)


def check_lost(device, break_it: Callable[[CudaBackend], None]) -> None:
    served = Breakable(make("llama", device, models=1), break_it)
    before = served.outputs()
    wrong = sum(output.finish_reason is not FinishReason.LENGTH for output in before)
    report("requests that failed before anything did", len(before), wrong)
    found = served.outputs(breaks_at=BREAKS_AT)
    print(f"  {found[0].error}", flush=True)
    unlike = sum(o.finish_reason is not FinishReason.ERROR or not str(o.error).startswith(DEAD) for o in found)
    report("requests that did not end with the GPU's failure", len(found), unlike)
    report("reasons but the first one", len(found), len({o.error for o in found}) - 1)
    is_refused = _is_refused(lambda: served.thread.submit(request(0), lambda events: None))
    report("a later request that was not refused", 1, int(not is_refused))
    served.thread.stop()  # nobody else may use the backend meanwhile
    is_refused = _is_refused(lambda: Driven(served.backend, [PLAIN], [200]))
    report("a later pass that was not refused", 1, int(not is_refused))


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except BackendDeadError as error:
        return str(error).startswith(DEAD)
    return False


def write_wild_slots(backend: CudaBackend) -> None:
    """Where the first tokens of all sequences should be."""
    import torch

    table = backend._state.inputs.table
    table[1:, : len(WILD)] = torch.tensor(WILD, dtype=torch.int64).to(table.device, torch.int32)


# Memory


def check_memory(
    new_backend: Callable[[], CudaBackend], full: Callable[[], AbstractContextManager[object]], count: int
) -> None:
    """Passes of `count` rows: plain ones run as before while the memory is full, and those with penalties, which need
    more of it, do not; they do when it is there again."""

    def drawn(backend: CudaBackend, params: int) -> PassResult:
        return Driven(backend, [params] * count, [200] * count).start(None).result()

    expected = _values(drawn(new_backend(), PENALTIES))
    gc.collect()
    backend = new_backend()
    before = _values(drawn(backend, PLAIN))
    report("control: rows of each other", count, _differing(before, before[1:] + before[:1]), control=True)
    with full():
        for _ in range(2):
            report("a pass without memory that did not fail", 1, int(not _runs_out(lambda: drawn(backend, PENALTIES))))
            report("the pass behind it", count, _differing(_values(drawn(backend, PLAIN)), before))
    report("the pass that failed, with memory", count, _differing(_values(drawn(backend, PENALTIES)), expected))


def _values(result: PassResult) -> list[tuple[int, bytes]]:
    assert result.draw is not None
    return [(int(t), x.tobytes()) for t, x in zip(result.draw.token_ids, result.draw.logprobs, strict=True)]


def _differing(found: list[tuple[int, bytes]], expected: list[tuple[int, bytes]]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


def _runs_out(call: Callable[[], object]) -> bool:
    try:
        call()
    except DeviceMemoryError:
        return True
    return False


@contextmanager
def full_memory() -> Iterator[None]:
    """Nothing of a megabyte is left on the GPU."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    hog, size = [], torch.cuda.mem_get_info()[0]
    while size > 1 << 20:
        try:
            hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    print(f"  {sum(len(x) for x in hog) / 2**30:.1f} GiB taken, {torch.cuda.mem_get_info()[0] >> 20} MiB left")
    try:
        yield
    finally:
        hog.clear()
        torch.cuda.empty_cache()


# Which runs in a process of its own


def _gpu():
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    return Gpu(0, cache_dir() / "cuda")


def run_lost(device) -> None:
    check_lost(device, write_wild_slots)


def run_memory(device) -> None:
    from tests.backends.cuda.chains_check import random_backend

    # Each on a device of its own: what one has freed on its stream is of no use to another.
    check_memory(lambda: random_backend(_gpu(), "smol"), full_memory, 32)


CASES = {"lost": run_lost, "memory": run_memory}


def run_alone(name: str) -> None:
    """One case; the process ends without a word to a GPU that may be lost."""
    try:
        device = _gpu()
        with device.current():
            CASES[name](device)
    except BaseException:
        traceback.print_exc()
        FAILED.append(name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(FAILED))


def main() -> None:
    if len(sys.argv) > 1:
        run_alone(sys.argv[1])
    failed = []
    for name in CASES:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "tests.backends.cuda.failures_check", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout, end="")
        print(f"{name}: {time.perf_counter() - begin:.0f} s, exit status {done.returncode}", flush=True)
        if done.returncode:
            failed.append(name)
    print("FAILED: " + "; ".join(failed) if failed else "all equal")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
