"""A draft model changes nothing of what the target can do, and a menu that cannot be kept still serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_llm import CONFIG, loaded, write_model
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec import SamplingParams
from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NativeOptions, NumpyOptions

FOUR_LAYERS = replace(CONFIG, num_layers=4)


def test_the_context_is_the_targets() -> None:
    configs = TinyConfig(context_len=96), TinyConfig(context_len=32, seed=2)
    tensors = [make_tensors(c) for c in configs]
    numpy_models = [LoadedModel(c.architecture, t.__getitem__) for c, t in zip(configs, tensors, strict=True)]
    native_models = [LoadedModel(c.architecture, t.__getitem__) for c, t in zip(configs, tensors, strict=True)]
    alone, pair = (
        NumpyBackend(models, NumpyOptions(num_slots=64, num_seq_rows=2)) for models in (numpy_models[:1], numpy_models)
    )
    native = NativeBackend(native_models, NativeOptions(num_slots=64, num_seq_rows=2, threads=1))
    assert pair.limits.context_len == alone.limits.context_len == native.limits.context_len == 96
    assert pair.fingerprint() == alone.fingerprint(), "nor is it part of the profile"
    assert pair.fingerprint(1) != pair.fingerprint(0) or configs[0].architecture == configs[1].architecture


@pytest.mark.slow
def test_a_menu_that_cannot_be_kept_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m.gguf", FOUR_LAYERS)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verispec.tuning.tuner.write_menu", full)
    with loaded(model, tmp_path / "cache", drafter="skip", force=True) as llm:
        assert llm.skip_menu() is not None
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
        assert answer.stats.drafted > 0
        assert llm.receipt([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True), answer.samples[0]).to_json()


@pytest.mark.slow
def test_too_little_room_to_tune_in_is_no_reason_not_to_generate(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", FOUR_LAYERS)
    with loaded(model, tmp_path / "cache", drafter="skip", kv_slots=24, max_len=20) as llm:
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5
    assert "verispec tune" in answer.stats.no_draft_reason
