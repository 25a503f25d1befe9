"""Models as data: architectures, the files they come in, and the models known by name.

Importing this package costs numpy and the standard library only; `gguf` is imported when a file needs it.
"""

from verispec.model.architecture import (
    Architecture,
    FrequencyFactors,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    Rope,
    expected_tensors,
    inverse_frequencies,
    make_layers,
)
from verispec.model.checkpoint import (
    Checkpoint,
    FolderTokenizerSource,
    GGUFTokenizerSource,
    TokenizerSource,
    open_checkpoint,
)
from verispec.model.gguf_file import GGUFFile, TensorInfo
from verispec.model.hub import DEFAULT_MODEL, REGISTRY, RegistryModel, cache_dir, resolve
from verispec.model.safetensors_folder import SafetensorsFolder

__all__ = [
    "DEFAULT_MODEL",
    "REGISTRY",
    "Architecture",
    "Checkpoint",
    "FolderTokenizerSource",
    "FrequencyFactors",
    "GGUFFile",
    "GGUFTokenizerSource",
    "LayerSpec",
    "LinearScaling",
    "Llama3Scaling",
    "RegistryModel",
    "Rope",
    "SafetensorsFolder",
    "TensorInfo",
    "TokenizerSource",
    "cache_dir",
    "expected_tensors",
    "inverse_frequencies",
    "make_layers",
    "open_checkpoint",
    "resolve",
]
