"""Checkpoints onto a GPU: how much K/V fits beside them, and the backend made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from verispec.backends.audit import Progress
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.cuda.device import Gpu
from verispec.backends.options import CudaOptions
from verispec.errors import InputError
from verispec.model.architecture import Architecture, expected_tensors
from verispec.model.checkpoint import Checkpoint

_WORKSPACE_NBYTES = 3 << 29  # activations, logits, graphs and the library's own
_MOST_SLOTS = 1 << 19
_LEAST_SLOTS = 256
_BF16_NBYTES = 2


def fitting_slots(architectures: Sequence[Architecture], *, index: int, gpu_memory: float) -> int:
    """How many tokens of K/V fit into this share of the device's memory, beside weights and workspace."""
    free, total = torch.cuda.mem_get_info(index)
    weights = sum(prod(spec.shape) for arch in architectures for spec in expected_tensors(arch).values()) * _BF16_NBYTES
    per_slot = sum(2 * a.num_layers * a.num_kv_heads * a.head_dim for a in architectures) * _BF16_NBYTES
    room = min(free, int(total * gpu_memory)) - weights - _WORKSPACE_NBYTES * len(architectures)
    slots = min(_MOST_SLOTS, room // per_slot)
    if slots < _LEAST_SLOTS:
        raise InputError(
            f"gpu_memory {gpu_memory} of {total / 2**30:.0f} GiB, of which {free / 2**30:.1f} are free, leaves no room "
            f"for K and V beside {weights / 2**30:.1f} GiB of weights: use a smaller model, or free the GPU"
        )
    return int(slots)


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(f"{what} do not fit into the GPU's memory: lower kv_slots, or use a smaller model") from error


def load(checkpoints: Sequence[Checkpoint], options: CudaOptions, *, progress: Progress) -> CudaBackend:
    """The backend with these models."""

    def reader(checkpoint: Checkpoint) -> CudaModel:
        expected = expected_tensors(checkpoint.architecture)

        def read(name: str) -> object:
            if name not in expected:
                raise KeyError(name)
            return checkpoint.tensor(name)

        return CudaModel(checkpoint.architecture, read)

    with _one_sentence(f"the weights and K/V of {options.num_slots:,} tokens"):
        return CudaBackend(
            [reader(c) for c in checkpoints], device=Gpu(options.device, options.cache_folder),
            num_slots=options.num_slots, num_seq_rows=options.num_seq_rows, context_len=options.context_len,
            max_tail=options.max_tail, progress=progress,
        )  # fmt: skip
