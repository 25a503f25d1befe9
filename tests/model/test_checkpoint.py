"""A model means the same whichever file it came in, and nothing unsupported is ignored."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_models import (
    FOLDER_TYPES,
    GGUF_TYPES,
    K_QUANTS,
    TinyConfig,
    gguf_name,
    k_quant_config,
    make_tensors,
    write_folder,
    write_gguf,
)
from verispec.errors import InputError, ModelFileError, UnsupportedModelError
from verispec.model import open_checkpoint
from verispec.model.architecture import FrequencyFactors, LinearScaling, Llama3Scaling, expected_tensors
from verispec.model.checkpoint import FolderTokenizerSource, GGUFTokenizerSource
from verispec.model.gguf_file import open_gguf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=64)


def assert_same_tensors(path: Path, expected: dict[str, np.ndarray]) -> None:
    with open_checkpoint(path) as checkpoint:
        assert set(expected_tensors(checkpoint.architecture)) == set(expected)
        for name, values in expected.items():
            found = checkpoint.tensor(name)
            assert (found.dtype, found.shape, found.flags.c_contiguous) == (np.float32, values.shape, True)
            assert found.tobytes() == values.tobytes(), name


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_back_architecture_and_weights(family: str, tied_head: bool, tmp_path: Path) -> None:
    config = TinyConfig(family=family, tied_head=tied_head, norm_eps=2.0**-16)
    path = tmp_path / "model.gguf"
    assert_same_tensors(path, write_gguf(path, config) and make_tensors(config))
    found = open_checkpoint(path).architecture
    assert found == dataclasses.replace(config.architecture, family="llama" if family == "mistral" else family)


@pytest.mark.parametrize("type_name", GGUF_TYPES)
def test_gguf_weights_of_every_type(type_name: str, tmp_path: Path) -> None:
    config = k_quant_config() if type_name in K_QUANTS else TinyConfig()
    path = tmp_path / "model.gguf"
    assert_same_tensors(path, write_gguf(path, config, type_name=type_name))


def test_q_and_k_are_permuted_in_llama_files_and_only_there(tmp_path: Path) -> None:
    for family, is_permuted in (("llama", True), ("qwen2", False)):
        config = TinyConfig(family=family)
        path = tmp_path / f"{family}.gguf"
        tensors = write_gguf(path, config)
        with open_gguf(path) as file:
            for part in ("q", "k"):
                stored = file.read(gguf_name(f"layers.0.{part}"))
                assert np.array_equal(stored, tensors[f"layers.0.{part}"]) != is_permuted
            np.testing.assert_array_equal(file.read(gguf_name("layers.0.v")), tensors["layers.0.v"])


@pytest.mark.parametrize("transformers", [4, 5])
@pytest.mark.parametrize("scaling", [None, LinearScaling(4.0), LLAMA3])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gives_back_architecture_and_weights(
    family: str, scaling: Any, transformers: int, tmp_path: Path
) -> None:
    config = TinyConfig(family=family, scaling=scaling, theta=5e5, tied_head=family == "qwen2")
    expected = write_folder(tmp_path, config, transformers=transformers)
    assert_same_tensors(tmp_path, expected)
    assert open_checkpoint(tmp_path).architecture == config.architecture


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("type_name", FOLDER_TYPES)
def test_folder_weights_of_every_type(type_name: str, num_shards: int, tmp_path: Path) -> None:
    assert_same_tensors(tmp_path, write_folder(tmp_path, TinyConfig(), type_name=type_name, num_shards=num_shards))


def test_both_formats_of_one_model_are_equal(tmp_path: Path) -> None:
    config = TinyConfig(norm_eps=2.0**-16)
    write_gguf(tmp_path / "model.gguf", config)
    write_folder(tmp_path / "folder", config)
    one, other = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "folder")
    assert one.architecture == other.architecture
    for name in expected_tensors(one.architecture):
        np.testing.assert_array_equal(one.tensor(name), other.tensor(name))


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    factors = FrequencyFactors(tuple(1.0 + i for i in range(8)))
    for scaling in (None, LinearScaling(4.0), factors):
        write_gguf(path, TinyConfig(scaling=scaling))
        assert open_checkpoint(path).architecture.layers[0].rope.scaling == scaling
    for metadata, scaling in (
        ({"llama.rope.scale_linear": 2.0}, LinearScaling(2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, None),
        ({"llama.rope.scaling.factor": 1.0}, None),
    ):
        write_gguf(path, TinyConfig(), metadata=metadata)
        assert open_checkpoint(path).architecture.layers[0].rope.scaling == scaling


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 128}, (128, 128, 128)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64, 64)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, (None, None, None)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, (None, None, None)),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 32},
            (None, 32, None),
        ),
        ("llama", {"sliding_window": 64}, (None, None, None)),
        ("gemma3", {"layer_types": None, "_sliding_window_pattern": 3}, (21, 21, None)),
        ("gemma3", {"layer_types": None}, (21, 21, 21)),
    ],
)
def test_windows_are_those_of_transformers(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    write_folder(tmp_path, TinyConfig(family=family, num_layers=3), config_changes=changes)
    arch = open_checkpoint(tmp_path).architecture
    assert tuple(spec.window for spec in arch.layers) == windows
    assert arch.context_len == 256


def test_gguf_sliding_window_limits_the_context(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig(), metadata={"llama.attention.sliding_window": 100})
    assert open_checkpoint(tmp_path / "m.gguf").architecture.context_len == 100


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "'gelu'; supported: silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'; supported: default, linear, llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"rope_interleaved": True}, "rope_interleaved"),
    ],
)
def test_unsupported_folders_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_folder(tmp_path, TinyConfig(), config_changes=changes)
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 10**6}, "num_layers must be between"),
        ({"num_attention_heads": 0}, "num_heads must be between"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"vocab_size": 10**30}, "vocab_size must be an integer"),
        ({"rms_norm_eps": float("nan")}, "NaN is not a number there"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "rope_factor must be positive"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"architectures": "LlamaForCausalLM"}, "list of strings"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"sliding_window": "x", "use_sliding_window": True}, "sliding_window must be an integer"),
        ({"num_hidden_layers": 3}, r"layers\.2.*is missing"),
        ({"num_hidden_layers": 1}, r"unknown tensors, first 'model\.layers\.1"),
        ({"vocab_size": 81}, r"embed_tokens\.weight' has shape \[80, 64\], expected \[81, 64\]"),
        ({"head_dim": 32}, r"q_proj\.weight' has shape \[64, 64\], expected \[128, 64\]"),
    ],
)
def test_malformed_folders_are_refused_with_the_place(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_folder(tmp_path, TinyConfig(), config_changes=changes)
    with pytest.raises(ModelFileError, match=named) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "8 experts; supported: dense"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'; supported: none, linear"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
        ({"split.count": 2}, "2 parts"),
    ],
)
def test_unsupported_gguf_files_are_refused_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", TinyConfig(), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(tmp_path / "model.gguf")


def test_unsupported_gguf_architecture_and_mixed_rope_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, TinyConfig(), arch="gemma2")
    with pytest.raises(UnsupportedModelError, match="'gemma2'; supported in GGUF files: llama, qwen2, qwen3, gemma3"):
        open_checkpoint(path)
    write_gguf(path, TinyConfig(scaling=FrequencyFactors((2.0,) * 8)), metadata={"llama.rope.scaling.factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="together"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "2"}, "llama.block_count must be an integer"),
        ({"llama.block_count": 1 << 30}, "num_layers must be between"),
        ({"llama.block_count": 3}, r"blk\.2.*is missing"),
        ({"llama.feed_forward_length": [96, 96]}, "feed_forward_length must be an integer"),
        ({"llama.attention.head_count": 0}, "num_heads must be between"),
        ({"llama.embedding_length": 32}, r"token_embd\.weight' has shape \[80, 64\], expected \[80, 32\]"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base must be a finite number"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "norm_eps must be positive"),
    ],
)
def test_malformed_gguf_files_are_refused_with_the_place(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, TinyConfig(), metadata=metadata)
    with pytest.raises(ModelFileError, match=named) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_tensors_nobody_would_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, TinyConfig(), extra_tensors={"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        open_checkpoint(path)


def test_wrong_frequency_factors_and_missing_embedding_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for factors, named in ((np.ones(3), r"shape \[3\], expected \[8\]"), (np.full(8, np.nan), "factor must be")):
        write_gguf(path, TinyConfig(), extra_tensors={"rope_freqs.weight": factors.astype(np.float32)})
        with pytest.raises(ModelFileError, match=named):
            open_checkpoint(path)
    tensors = make_tensors(TinyConfig())
    del tensors["embed"]
    write_gguf(path, TinyConfig(), tensors)
    with pytest.raises(ModelFileError, match=r"token_embd\.weight' is missing"):
        open_checkpoint(path)


def test_a_tied_folder_may_repeat_its_head_and_an_unsaid_one_is_decided_by_the_files(tmp_path: Path) -> None:
    tensors = make_tensors(TinyConfig())
    write_folder(tmp_path, TinyConfig(), tensors, config_changes={"tie_word_embeddings": True})
    assert open_checkpoint(tmp_path).architecture.tied_head
    write_folder(tmp_path, TinyConfig(), tensors, config_changes={"tie_word_embeddings": None})
    assert not open_checkpoint(tmp_path).architecture.tied_head
    del tensors["head"]
    write_folder(tmp_path, TinyConfig(), tensors, config_changes={"tie_word_embeddings": None})
    assert open_checkpoint(tmp_path).architecture.tied_head
    write_folder(tmp_path, TinyConfig(), tensors)
    with pytest.raises(ModelFileError, match="lm_head"):
        open_checkpoint(tmp_path)


def test_tokenizer_sources_point_at_the_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig(), metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    source = open_checkpoint(tmp_path / "m.gguf").tokenizer_source
    assert isinstance(source, GGUFTokenizerSource)
    assert source.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    write_folder(tmp_path / "folder", TinyConfig(), extra_files={"tokenizer.json": b"{}"})
    for path in (tmp_path / "folder", tmp_path / "folder" / "model.safetensors"):
        assert open_checkpoint(path).tokenizer_source == FolderTokenizerSource(tmp_path / "folder")


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        open_checkpoint(tmp_path / "absent.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(UnsupportedModelError, match="supported: GGUF, safetensors"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_unknown_tensor_names_are_the_callers_mistake(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig(tied_head=True))
    with pytest.raises(InputError, match="'head'"):
        open_checkpoint(tmp_path / "m.gguf").tensor("head")
