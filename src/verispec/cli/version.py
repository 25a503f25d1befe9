"""`verispec --version`: the version, the backend, and the profile of the default model if it has been loaded."""

from __future__ import annotations

from verispec import __version__


def describe() -> str:
    """Three lines, and one more if the native backend is missing."""
    from verispec.backends.blas import cpu_name
    from verispec.backends.select import default_backend, what_is_lost

    name = default_backend()
    lines = [f"verispec {__version__}", f"backend: {name}{_kernels(name)}; {cpu_name()}"]
    if (lost := what_is_lost()) is not None:
        lines.append(f"note: {lost}")
    return "\n".join([*lines, f"profile: {_default_profile(name)}"])


def _kernels(name: str) -> str:
    """What computes, in a few words."""
    if name == "numpy":
        from verispec.backends.blas import blas_name

        return f" on {blas_name()}"
    from verispec.backends.native_library import Kernels

    return f" with {Kernels(1).isa} kernels"


def _default_profile(name: str) -> str:
    from verispec.backends.calibration import cached_profile
    from verispec.backends.select import describe as describe_backend
    from verispec.errors import VerispecError
    from verispec.model import DEFAULT_MODEL, cache_dir, open_checkpoint
    from verispec.model.hub import cached_path

    path = cached_path(DEFAULT_MODEL)
    if path is None:
        return f"none yet ({DEFAULT_MODEL} is not fetched)"
    try:
        with open_checkpoint(path) as checkpoint:
            profile = cached_profile(*describe_backend(name, [checkpoint.architecture]), cache_dir())
    except VerispecError as error:
        return f"none ({error})"
    return f"{profile.hash} ({DEFAULT_MODEL})" if profile else f"none yet ({DEFAULT_MODEL} was not loaded yet)"
