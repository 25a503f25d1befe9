"""Checkpoints onto a GPU: the backend made of them."""

from __future__ import annotations

from collections.abc import Sequence

from verispec.backends.audit import Progress
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.cuda.device import Gpu
from verispec.backends.gpu import all_of, loading
from verispec.backends.options import DRAFT_BITS, CudaOptions
from verispec.model.architecture import expected_tensors
from verispec.model.checkpoint import Checkpoint


def load(checkpoints: Sequence[Checkpoint], options: CudaOptions, *, progress: Progress) -> CudaBackend:
    """The backend with these models. It reports what it compiles for as long as it lives."""

    def reader(checkpoint: Checkpoint) -> CudaModel:
        expected = expected_tensors(checkpoint.architecture)

        def read(name: str) -> object:
            if name not in expected:
                raise KeyError(name)
            return checkpoint.tensor(name)

        return CudaModel(checkpoint.architecture, read)

    draft_weights = options.fast_weights if DRAFT_BITS[options.fast_weights] else ""
    device = Gpu(options.device, options.cache_folder, lambda: progress("compiling kernels", 0.0))
    with loading(all_of(options.num_slots)):
        return CudaBackend(
            [reader(c) for c in checkpoints], device=device, num_slots=options.num_slots,
            num_seq_rows=options.num_seq_rows, context_len=options.context_len,
            max_tail=options.max_tail, progress=progress, draft_weights=draft_weights,
        )  # fmt: skip
