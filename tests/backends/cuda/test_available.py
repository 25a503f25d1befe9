"""Why the CUDA backend cannot serve is one sentence that says what to do."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verispec.backends import select
from verispec.backends.cuda import available, compiler
from verispec.errors import InputError

_CPU_BUILD, _CUDA_BUILD = "cuda: Optional[str] = None\n", "cuda: Optional[str] = '13.0'\n"


class FakeDriver:
    """A machine with GPUs of one compute capability, and a driver for one version of CUDA."""

    def __init__(self, *, devices: int = 1, capability: tuple[int, int] = (9, 0), cuda: int = 13000, starts: int = 0):
        self._devices, self._capability, self._cuda, self._starts = devices, capability, cuda, starts

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._starts

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self._devices
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        value._obj.value = self._capability[attribute - 75]
        return 0

    def cuDriverGetVersion(self, value: Any) -> int:  # noqa: N802
        value._obj.value = self._cuda
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Installs what a case says in the place of this machine's; without changes the CUDA backend can serve."""
    version_file = tmp_path / "version.py"

    def install(*, driver: Any = None, torch: str | None = "2.10.0", build: str = _CUDA_BUILD, missing: Any = None):
        version_file.write_text(f"__version__ = '{torch}'\n{build}hip: Optional[str] = None\n")
        spec = None if torch is None else ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(available, "_driver", lambda: driver or FakeDriver())
        monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(available.importlib.metadata, "version", lambda name: torch)
        monkeypatch.setattr(compiler, "what_is_missing", missing or (lambda: None))

    for asked in (available.why_not, available.num_devices):
        asked.cache_clear()
    yield install
    for asked in (available.why_not, available.num_devices):
        asked.cache_clear()


@pytest.mark.parametrize(
    ("changes", "says", "remedy"),
    [
        ({"driver": FakeDriver(starts=3)}, "driver does not start (error 3)", "look at nvidia-smi"),
        ({"driver": FakeDriver(devices=0)}, "no CUDA device 0: this machine has 0", "device 0"),
        ({"driver": FakeDriver(capability=(8, 9))}, "capability 8.9, and the kernels are written for 9.0", "use the"),
        ({"torch": None}, "torch 2.10 or newer is missing", "pip install 'verispec[cuda]'"),
        ({"torch": "2.9.1+cu130"}, "torch is 2.9.1+cu130, and 2.10 or newer is needed", "--upgrade"),
        ({"torch": "1.13.0"}, "torch is 1.13.0", "--upgrade"),
        ({"build": _CPU_BUILD}, "torch 2.10.0 was built for CPUs alone", "pip uninstall torch"),
        ({"driver": FakeDriver(cuda=12080)}, "needs a driver for CUDA 13.0, and this one knows CUDA 12.8", "update"),
        ({"missing": lambda: "NVRTC cannot be loaded: pip install"}, "NVRTC", "pip install"),
    ],
)  # fmt: skip
def test_why_not_is_one_sentence(machine: Any, changes: dict[str, Any], says: str, remedy: str) -> None:
    """And the backend that serves instead is the best of the others. The control: without changes all is well."""
    machine(**changes)
    with pytest.raises(InputError) as found:
        select.check_name("cuda")
    sentence = str(found.value)
    assert says in sentence
    assert remedy in sentence
    assert "\n" not in sentence
    has_torch = available.why_no_torch() is None and available.num_devices() > 0
    assert (select.default_backend() == "torch") is has_torch
    available.why_not.cache_clear()
    available.num_devices.cache_clear()
    machine()
    select.check_name("cuda")
    assert select.default_backend() == "cuda"


def test_a_device_that_is_not_there_is_named(machine: Any) -> None:
    machine(driver=FakeDriver(devices=2))
    select.check_name("cuda", 1)
    with pytest.raises(InputError, match=r"no CUDA device 2: this machine has 2, and the first is device 0"):
        select.check_name("cuda", 2)


def test_a_gpu_that_only_lacks_software_is_not_left_out_silently(machine: Any) -> None:
    machine(build=_CPU_BUILD)
    assert "built for CPUs alone" in str(select.what_is_lost("native"))
    available.why_not.cache_clear()
    machine(driver=FakeDriver(capability=(7, 5)), build=_CPU_BUILD)
    assert select.what_is_lost("native") is None


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def fake_bindings(monkeypatch: pytest.MonkeyPatch, version: Any) -> None:
    """A package `cuda.bindings` whose compiler answers as `version` does."""
    modules = {name: ModuleType(name) for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc")}
    modules["cuda.bindings"].nvrtc = modules["cuda.bindings.nvrtc"]
    modules["cuda.bindings"].driver = ModuleType("cuda.bindings.driver")
    modules["cuda.bindings.nvrtc"].nvrtcVersion = version
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_what_compiling_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bindings, the compiler's library, headers; and nothing."""

    def not_found() -> None:
        raise RuntimeError("libnvrtc.so.13 was not found")

    with monkeypatch.context() as patch:
        without(patch, "cuda", "cuda.bindings")
        assert "cuda-bindings is missing" in str(compiler.what_is_missing())
    fake_bindings(monkeypatch, not_found)
    assert "NVRTC, CUDA's compiler, cannot be loaded: pip install" in str(compiler.what_is_missing())
    fake_bindings(monkeypatch, lambda: (0, 13, 0))
    with monkeypatch.context() as patch:
        without(patch, "nvidia")
        assert "CUDA's headers are missing" in str(compiler.what_is_missing())
    nvidia = ModuleType("nvidia")
    nvidia.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    assert "CUDA's headers are missing" in str(compiler.what_is_missing())
    (tmp_path / "cu13" / "include").mkdir(parents=True)
    (tmp_path / "cu13" / "include" / "cuda_bf16.h").touch()
    assert compiler.what_is_missing() is None


def test_only_what_is_compiled_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once per source and sizes where there is a folder; every time without one."""
    compiled: list[str] = []
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0")
    monkeypatch.setattr(compiler, "compile_cubin", lambda source, defines: f"{source}{defines}".encode())

    def get(folder: Path | None, **defines: int) -> bytes:
        return compiler.Cubins(folder, lambda: compiled.append("")).get("steps.cu", defines)

    assert get(tmp_path / "new", A=1) == get(tmp_path / "new", A=1) == b"steps.cu{'A': 1}"
    assert len(compiled) == 1
    assert get(tmp_path / "new", A=2) == b"steps.cu{'A': 2}"
    assert len(compiled) == 2
    assert get(None, A=1) == get(None, A=1)
    assert len(compiled) == 4
