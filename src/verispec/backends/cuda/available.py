"""Whether a GPU can serve here, asked of the driver alone: torch takes seconds to import, and is not needed for it."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

_CAPABILITY = (9, 0)  # Hopper: the arithmetic is that of its tensor cores
_MAJOR, _MINOR = 75, 76  # attributes of the driver's interface


@cache
def num_devices() -> int:
    """How many GPUs the driver knows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@cache
def why_not(index: int = 0) -> str | None:
    """Why the CUDA backend cannot serve on this device, and what to do, in one sentence; None if it can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver was found: install one, or use the native backend"
    if (code := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver does not start (error {code}): look at nvidia-smi, or use the native backend"
    value, device = ctypes.c_int(), ctypes.c_int()
    if not 0 <= index < num_devices():
        return f"there is no CUDA device {index}: this machine has {num_devices()}"
    driver.cuDeviceGet(ctypes.byref(device), index)
    found = []
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value)
    if tuple(found) != _CAPABILITY:
        return (
            f"CUDA device {index} has compute capability {found[0]}.{found[1]}, and the kernels are written for 9.0 "
            "(H100, H200): use the native backend"
        )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("cuda") is None:
        return "torch 2.10 or newer is missing: pip install 'verispec[cuda]'"
    return None
