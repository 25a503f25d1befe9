"""Whether a GPU can serve here, asked of the driver and of files: torch takes seconds to import, and is not needed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from verispec.backends.cuda import compiler
from verispec.backends.cuda.compiler import INSTALL

_CAPABILITY = (9, 0)  # Hopper: the arithmetic is that of its tensor cores
_MAJOR, _MINOR = 75, 76  # attributes of the driver's interface
_LEAST_TORCH = (2, 10)


def _driver() -> Any:
    """The driver's library; None without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@cache
def num_devices() -> int:
    """How many GPUs the driver knows; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@cache
def why_not(index: int = 0) -> str | None:
    """Why the CUDA backend cannot serve on this device, and what to do, in one sentence; None if it can."""
    return why_no_device(index) or why_no_torch() or compiler.what_is_missing()


def why_no_device(index: int) -> str | None:
    """The same of the driver and the device alone, whatever is installed for it."""
    driver = _driver()
    if driver is None:
        return "no NVIDIA driver was found: install one, or use the native backend"
    if (code := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver does not start (error {code}): look at nvidia-smi, or use the native backend"
    if not 0 <= index < num_devices():
        return f"there is no CUDA device {index}: this machine has {num_devices()}, and the first is device 0"
    value, device = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    found = []
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value)
    if tuple(found) != _CAPABILITY:
        return (
            f"CUDA device {index} has compute capability {found[0]}.{found[1]}, and the kernels are written for 9.0 "
            "(H100, H200): use the torch or the native backend"
        )
    return None


def why_no_torch() -> str | None:
    """Why torch cannot use the GPUs that the driver knows, and what to do, in one sentence; None if it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return f"torch 2.10 or newer is missing: {INSTALL}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"torch's version is not known, and 2.10 or newer is needed: {INSTALL}"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _LEAST_TORCH:
        return f"torch is {version}, and 2.10 or newer is needed: {INSTALL} --upgrade"
    cuda = _cuda_of(Path(spec.origin).with_name("version.py"))
    if cuda is None:
        return f"torch {version} was built for CPUs alone: pip uninstall torch, then {INSTALL}"
    driver, known = _driver(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(known))
    if known.value // 1000 < int(cuda.partition(".")[0]):  # drivers serve all minor versions of what they know
        return (
            f"torch {version} needs a driver for CUDA {cuda}, and this one knows CUDA {known.value // 1000}."
            f"{known.value % 1000 // 10}: update the NVIDIA driver, or install a torch that was built for an older CUDA"
        )
    return None


def _cuda_of(version_file: Path) -> str | None:
    """The CUDA version that a torch was built for, as its build wrote it down; None of a build for CPUs."""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else found[1]
