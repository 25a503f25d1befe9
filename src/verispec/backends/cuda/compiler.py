"""CUDA C++ to kernels through NVRTC, with a disk cache, and their launch on a stream.

Contraction is off, division and square root are IEEE and denormals are kept: the bits are in the source. A machine
without a GPU can compile (`compile_cubin`) but not load.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verispec.errors import VerispecError

_SOURCES = Path(__file__).parent
_HEADERS = (
    "arithmetic.cuh", "chains.cuh", "copies.cuh", "draw.cuh", "epilogues.cuh", "noise.cuh", "steps.cuh", "tiles.cuh",
    "wide.cuh",
)  # fmt: skip
ARCHITECTURE = "sm_90a"
_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17")


_NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
INSTALL = "pip install 'verispec[cuda]'"


class CompileError(VerispecError):
    """The compiler refused a kernel. The device works; what is installed does not fit together."""


class CudaError(VerispecError, RuntimeError):
    """A call of the driver failed; `is_memory` if for want of the GPU's memory."""

    def __init__(self, message: str, *, is_memory: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC returned: one value, several as a tuple, or None. Raises CudaError."""
    error, *values = result
    if int(error) != 0:
        raise CudaError(f"CUDA refused a call with {error.name}", is_memory=error.name == _NO_MEMORY)
    return (values[0] if len(values) == 1 else tuple(values)) if values else None


def what_is_missing() -> str | None:
    """What compiling needs and this machine lacks, and what to do, in one sentence; None if all is there."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return f"cuda-bindings is missing, which comes with torch 2.10 or newer: {INSTALL}"
    try:
        compiler_version()
    except (RuntimeError, OSError):  # of whatever looks for libraries
        return f"NVRTC, CUDA's compiler, cannot be loaded: {INSTALL}"
    if not include_folders():
        return f"CUDA's headers are missing, which come with NVRTC: {INSTALL}"
    return None


def include_folders() -> list[Path]:
    """Where CUDA's headers lie: beside the NVRTC that pip installed. Empty if they are not there."""
    try:
        import nvidia
    except ImportError:
        return []
    folders = [Path(base) / kind / "include" for base in nvidia.__path__ for kind in ("cu13", "cuda_runtime")]
    return [folder for folder in folders if (folder / "cuda_bf16.h").exists()]


def runtime_library() -> Path | None:
    """CUDA's device runtime, for code that is linked; None if it does not lie beside the headers."""
    found = (folder.parent / "lib" / "libcudadevrt.a" for folder in include_folders())
    return next((path for path in found if path.exists()), None)


def _compiled(source: str, defines: Mapping[str, int], architecture: str, *more: str) -> Any:
    from cuda.bindings import nvrtc

    text = (_SOURCES / source).read_bytes()
    headers = [(_SOURCES / name).read_bytes() for name in _HEADERS]
    options = [f"--gpu-architecture={architecture}", *_OPTIONS, *more]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    options += [f"-I{folder}" for folder in include_folders()]
    names = [name.encode() for name in _HEADERS]
    program = checked(nvrtc.nvrtcCreateProgram(text, source.encode(), len(headers), headers, names))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(error) != 0:
        raise _not_compiled(source, defines, _log_of(program))
    return program


def _log_of(program: Any) -> str:
    from cuda.bindings import nvrtc

    log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="replace")


def _not_compiled(source: str, defines: Mapping[str, int], log: str) -> CompileError:
    """One sentence with the log's first error; the whole log is a note, which a traceback shows."""
    first = next((line for line in log.splitlines() if "error" in line), "no reason was given").strip()
    found = CompileError(
        f"the CUDA kernels do not compile with NVRTC {compiler_version()} ({first}): {INSTALL} --force-reinstall, or "
        "use the native backend"
    )
    found.add_note(f"{source} for {dict(defines)}:\n{log}")
    return found


def compile_cubin(
    source: str, defines: Mapping[str, int], architecture: str = ARCHITECTURE, *, relocatable: bool = False
) -> bytes:
    """Machine code of one source file of this folder, `relocatable` if it must be linked. Raises CompileError."""
    return _cubin(source, defines, architecture, *(["--relocatable-device-code=true"] if relocatable else []))[0]


def compile_verbose(source: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """The same, and what the assembler says of each kernel: its registers, and how much of them it spills."""
    return _cubin(source, defines, ARCHITECTURE, "--ptxas-options=-v")


def _cubin(source: str, defines: Mapping[str, int], architecture: str, *more: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    program = _compiled(source, defines, architecture, *more)
    code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    log = _log_of(program)
    checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), log


def compile_ptx(source: str, defines: Mapping[str, int], architecture: str = ARCHITECTURE) -> str:
    """The same as PTX, to be looked at: which operations there are, and which there must not be."""
    from cuda.bindings import nvrtc

    program = _compiled(source, defines, architecture.replace("sm", "compute"))
    text = bytearray(checked(nvrtc.nvrtcGetPTXSize(program)))
    checked(nvrtc.nvrtcGetPTX(program, text))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return text.decode()


def compiler_version() -> str:
    """NVRTC's version: part of the cache's key."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    checked((error,))
    return f"{major}.{minor}"


class Cubins:
    """Machine code by source and sizes, kept in `folder` (None: nowhere) under a hash of everything it depends on.

    `compiling` is called before anything is compiled, which takes up to seconds.
    """

    def __init__(self, folder: Path | None = None, compiling: Callable[[], object] = lambda: None) -> None:
        self._folder, self._compiling = folder, compiling

    def get(self, source: str, defines: Mapping[str, int]) -> bytes:
        """What `compile_cubin` gives, from the folder if it is there."""
        path = None if self._folder is None else self._folder / self._name(source, defines)
        if path is not None and path.exists():
            return path.read_bytes()
        self._compiling()
        code = compile_cubin(source, defines)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(code)
            os.replace(file.name, path)  # two processes may compile at once; either's file is whole
        return code

    def _name(self, source: str, defines: Mapping[str, int]) -> str:
        parts = [(_SOURCES / name).read_bytes() for name in (source, *_HEADERS)]
        key = hashlib.sha256(b"\0".join([*parts, repr((sorted(defines.items()), ARCHITECTURE, _OPTIONS)).encode()]))
        key.update(compiler_version().encode())
        return f"{Path(source).stem}-{key.hexdigest()[:32]}.cubin"


NOT_KEPT = Cubins()


class Kernel:
    """One loaded kernel. Its single parameter is a structure passed by value."""

    def __init__(self, module: Any, name: str) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._function = checked(driver.cuModuleGetFunction(module, name.encode()))
        self._shared_limit = 0
        ahead = driver.CUlaunchAttribute()
        ahead.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ahead.value.programmaticStreamSerializationAllowed = 1
        self._ahead = ahead

    def launch(
        self, grid: tuple[int, int, int], threads: int, args: ctypes.Structure, *, stream: int, shared: int = 0,
        ahead: bool = True, cluster: int = 1,
    ) -> None:  # fmt: skip
        """Put it on the stream. `ahead` lets it start before the kernel in front of it has ended; `cluster` neighbours
        of the grid's first dimension can read each other's shared memory."""
        driver = self._driver
        if shared > self._shared_limit:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(self._function, attribute, shared))
            self._shared_limit = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = stream
        config.attrs = [*([self._ahead] if ahead else []), *([self._neighbours(cluster)] if cluster > 1 else [])]
        config.numAttrs = len(config.attrs)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))

    def _neighbours(self, count: int) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = count, 1, 1
        return attribute


class Modules:
    """Kernels by source, sizes and name, compiled when first asked for."""

    def __init__(self, cubins: Cubins) -> None:
        self._cubins = cubins
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int]) -> Kernel:
        """Needs a current CUDA context (torch makes one)."""
        from cuda.bindings import driver

        key = (source, tuple(sorted(defines.items())))
        if key not in self._modules:
            self._modules[key] = checked(driver.cuModuleLoadData(self._cubins.get(source, defines)))
        return Kernel(self._modules[key], name)
