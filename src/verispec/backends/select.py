"""Which backend runs a model: the native one where it was built, else numpy; or the one that is named.

Imports a backend only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verispec.backends.audit import Progress, no_progress
from verispec.backends.protocol import Backend
from verispec.errors import InputError
from verispec.model.architecture import Architecture
from verispec.model.checkpoint import Checkpoint

BACKENDS = ("native", "numpy")
AS_STORED, QUANTISED = "as-stored", "q8"
WEIGHTS = (AS_STORED, QUANTISED)


class BackendOptions(NamedTuple):
    """How a backend is set up. `weights` and `kv_dtype` are for the native one; None is its default."""

    num_slots: int
    num_seq_rows: int
    threads: int | None = None
    weights: str = AS_STORED
    kv_dtype: str | None = None


def default_backend() -> str:
    """The fastest backend there is here."""
    from verispec.backends.native_library import why_missing

    return "numpy" if why_missing() else "native"


def what_is_lost() -> str | None:
    """One line about the native backend if it is missing; None if it is not."""
    from verispec.backends.native_library import why_missing

    reason = why_missing()
    return None if reason is None else f"the native backend is missing: {reason}. numpy serves, several times slower"


def check_name(name: str) -> None:
    """Raise InputError for a backend that does not exist, or not here."""
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    if name == "native" and (lost := what_is_lost()):
        raise InputError(f"backend native: {lost}")


def make_backend(
    name: str, checkpoints: Sequence[Checkpoint], options: BackendOptions, *, progress: Progress = no_progress
) -> Backend:
    """The named backend with the checkpoints' models in it: the target's first, then a draft model's."""
    check_name(name)
    if options.weights not in WEIGHTS:
        raise InputError(f"unknown weights {options.weights!r}; known: {', '.join(WEIGHTS)}")
    if name == "numpy":
        from verispec.backends.numpy_backend import LoadedModel, NumpyBackend

        if options.weights != AS_STORED or options.kv_dtype not in (None, "float32"):
            raise InputError("weights and kv_dtype are options of the native backend; numpy computes in float32")
        return NumpyBackend(
            [LoadedModel(c.architecture, c.tensor) for c in checkpoints],
            num_slots=options.num_slots,
            num_seq_rows=options.num_seq_rows,
            threads=options.threads,
        )
    from verispec.backends.native_backend import NativeBackend
    from verispec.backends.native_model import StoredModel

    quantises = options.weights == QUANTISED
    return NativeBackend(
        [StoredModel(c.architecture, c.tensor, c.stored, quantises=quantises) for c in checkpoints],
        num_slots=options.num_slots,
        num_seq_rows=options.num_seq_rows,
        threads=options.threads,
        kv_dtype=options.kv_dtype or "float16",
        progress=progress,
    )


def describe(name: str, architectures: Sequence[Architecture]) -> tuple[Mapping[str, str], tuple[int, ...]]:
    """Fingerprint and candidate shapes of a backend with default options, whose models need not be loaded for it."""
    if name == "numpy":
        from verispec.backends import numpy_backend

        return numpy_backend.fingerprint(architectures), numpy_backend.NumpyBackend.shapes
    from verispec.backends import native_backend

    return native_backend.fingerprint(architectures), native_backend.NativeBackend.shapes
