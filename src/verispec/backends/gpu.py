"""What every backend on a GPU needs of torch: how much K/V fits, and errors of the device as verispec's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.cuda.compiler import CudaError
from verispec.errors import BackendDeadError, DeviceMemoryError, InputError
from verispec.model.architecture import Architecture, expected_tensors

_WORKSPACE_NBYTES = 3 << 29  # activations, graphs and the library's own
_LOGITS_NBYTES = 4 << 10  # per token of the vocabulary: those of 1,024 rows
_MOST_SLOTS = 1 << 19
_LEAST_SLOTS = 256
Values = NDArray[Any]
_OF_CUDA = "CUDA error: "
_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def num_gpus() -> int:
    """How many torch has."""
    return int(torch.cuda.device_count())


def fitting_slots(
    architectures: Sequence[Architecture],
    *,
    index: int,
    gpu_memory: float,
    value_nbytes: int,
    draft_bits: Sequence[int],
) -> int:
    """How many tokens of K/V fit into this share of the device's memory, beside weights and workspace. Models have
    second sets of weights of `draft_bits`, 0 for none."""
    with loading("CUDA's own data"):
        free, total = torch.cuda.mem_get_info(index)
    weights = 0
    for arch, bits in zip(architectures, draft_bits, strict=True):
        count = sum(prod(spec.shape) for spec in expected_tensors(arch).values())
        weights += count * value_nbytes + (count * (2 * bits + 1) // 16 if bits else 0)  # 32 share a scale of 16 bits
    per_slot = sum(2 * a.num_layers * a.num_kv_heads * a.head_dim for a in architectures) * value_nbytes
    workspace = sum(_WORKSPACE_NBYTES + _LOGITS_NBYTES * a.vocab_size for a in architectures)
    room = min(free, int(total * gpu_memory)) - weights - workspace
    slots = min(_MOST_SLOTS, room // per_slot)
    if slots < _LEAST_SLOTS:
        raise InputError(
            f"gpu_memory {gpu_memory} of {total / 2**30:.0f} GiB, of which {free / 2**30:.1f} are free, leaves no room "
            f"for K and V beside {weights / 2**30:.1f} GiB of weights: use a smaller model, or free the GPU"
        )
    return int(slots)


def all_of(num_slots: int) -> str:
    """What a model takes of the GPU's memory."""
    return f"the weights and K/V of {num_slots:,} tokens"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """What goes wrong with the device inside is one sentence; `what` is to have room there."""
    try:
        yield
    except RuntimeError as error:
        failure = _Failure.of(error)
        if failure is None:
            raise
        if failure.is_memory:
            remedy = "lower kv_slots, use a smaller model, or free the GPU"
            raise InputError(f"{what} do not fit into the GPU's memory: {remedy}") from error
        raise BackendDeadError(
            f"the GPU failed while the model was loaded ({failure.reason}): look at nvidia-smi, then try again"
        ) from error


class _Failure(NamedTuple):
    """What an error says of the device."""

    reason: str
    is_memory: bool

    @classmethod
    def of(cls, error: RuntimeError) -> _Failure | None:
        """None if it is about something else. Libraries that torch calls have errors of no type of their own, but begin
        like torch's."""
        reason = str(error).split("\n", 1)[0]
        if isinstance(error, CudaError):
            return cls(reason, error.is_memory)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if not is_memory and not isinstance(error, torch.AcceleratorError) and not reason.startswith(_OF_CUDA):
            return None
        return cls(reason, is_memory or any(words in reason for words in _MEMORY_WORDS))


def is_fault(error: RuntimeError) -> bool:
    """Whether it says that a call of CUDA failed, and not for want of memory."""
    failure = _Failure.of(error)
    return failure is not None and not failure.is_memory


class Health:
    """Whether the device still works. An error of CUDA is for ever, and `failed` hears of it; only memory that ran out
    is not."""

    def __init__(self, failed: Callable[[], object] = lambda: None) -> None:
        self._failure, self._failed = "", failed

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of the device inside are raised as verispec's."""
        if self._failure:
            raise BackendDeadError(self._failure)
        try:
            yield
        except RuntimeError as error:
            failure = _Failure.of(error)
            if failure is None:
                raise
            if failure.is_memory:
                raise DeviceMemoryError("the GPU's memory ran out in a pass: lower gpu_memory or kv_slots") from error
            self._failure = f"the GPU failed and cannot be used by this process any more: {failure.reason}"
            self._failed()
            raise BackendDeadError(self._failure) from error

    def guarding(self, probes: Sequence[KernelProbe]) -> list[KernelProbe]:
        """Probes whose runs are guarded."""

        def guarded(run: Callable[[Values], Values], x: Values) -> Values:
            with self.guarded():
                return run(x)

        return [replace(probe, run=partial(guarded, probe.run)) for probe in probes]
