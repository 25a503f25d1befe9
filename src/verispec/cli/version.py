"""`verispec --version`: the version, the backend, and the profile of the default model if it has been audited."""

from __future__ import annotations

from verispec import __version__


def describe() -> str:
    """Three lines."""
    from verispec.backends.blas import blas_name, cpu_name

    return "\n".join(
        [f"verispec {__version__}", f"backend: numpy on {blas_name()}; {cpu_name()}", f"profile: {_default_profile()}"]
    )


def _default_profile() -> str:
    from verispec.backends.calibration import cached_profile
    from verispec.backends.numpy_backend import fingerprint
    from verispec.errors import VerispecError
    from verispec.model import DEFAULT_MODEL, cache_dir, open_checkpoint
    from verispec.model.hub import cached_path

    path = cached_path(DEFAULT_MODEL)
    if path is None:
        return f"none yet ({DEFAULT_MODEL} is not fetched)"
    try:
        with open_checkpoint(path) as checkpoint:
            profile = cached_profile(fingerprint([checkpoint.architecture]), cache_dir())
    except VerispecError as error:
        return f"none ({error})"
    return f"{profile.hash} ({DEFAULT_MODEL})" if profile else f"none yet ({DEFAULT_MODEL} is not audited)"
