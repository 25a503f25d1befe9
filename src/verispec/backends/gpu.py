"""What every backend on a GPU needs of torch: how much K/V fits, and errors of the device as verispec's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from verispec.backends.cuda.compiler import CudaError
from verispec.errors import BackendDeadError, DeviceMemoryError, InputError
from verispec.model.architecture import Architecture, expected_tensors

_WORKSPACE_NBYTES = 3 << 29  # activations, graphs and the library's own
_LOGITS_NBYTES = 4 << 10  # per token of the vocabulary: those of 1,024 rows
_MOST_SLOTS = 1 << 19
_LEAST_SLOTS = 256


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


@contextmanager
def loading(num_slots: int) -> Iterator[None]:
    """Memory that runs out inside is one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"the weights and K/V of {num_slots:,} tokens"
        raise InputError(f"{what} do not fit into the GPU's memory: lower kv_slots, or use a smaller model") from error


class Health:
    """Whether the device still works. An error of CUDA is for ever; only memory that ran out is not."""

    def __init__(self) -> None:
        self._failure = ""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of the device inside are raised as verispec's."""
        if self._failure:
            raise BackendDeadError(self._failure)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError("the GPU's memory ran out in a pass: lower gpu_memory or kv_slots") from error
        except (torch.AcceleratorError, CudaError) as error:
            reason = str(error).split("\n", 1)[0]
            self._failure = f"the GPU failed and cannot be used by this process any more: {reason}"
            raise BackendDeadError(self._failure) from error
