"""A model that is loaded by the CUDA backend, with a CPU in the place of the GPU: what loading reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.cuda_stand_in import StandIn, StandInKernels
from tests.support.tiny_llm import CONFIG, write_model
from verispec.backends.cuda import available, load
from verispec.llm import LLM

pytestmark = pytest.mark.cuda


class Compiling(StandIn):
    """Says that it compiles whenever it is asked for a model's kernels."""

    def __init__(self, index: int, cache_folder: Path, compiling: Callable[[], object]) -> None:
        super().__init__()
        self.compiling = compiling

    def kernels(self, shapes) -> StandInKernels:
        self.compiling()
        return super().kernels(shapes)


def test_what_is_compiled_while_a_model_loads_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what is compiled later, when nobody waits for loading."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(available, "why_not", lambda index=0: None)
    monkeypatch.setattr(load, "Gpu", Compiling)
    stages: list[str] = []
    path = write_model(tmp_path / "tiny.gguf", replace(CONFIG, hidden_size=64, head_dim=16, vocab_size=48))
    with LLM(path, backend="cuda", kv_slots=64, progress=lambda stage, share: stages.append(stage)) as llm:
        kinds = list(dict.fromkeys(stage.partition(" ")[0] for stage in stages))
        assert stages.count("compiling kernels") == 2, "of the model, and of the one with known answers"
        assert kinds[:3] == ["loading", "compiling", "checking"]
        stages.clear()
        llm.backend._device.compiling()
        assert not stages
