"""Models by their Hugging Face id, such as org/name, fetched with `huggingface_hub` where that package is installed.

Files go into that package's own cache, which other tools share, and its settings (token, mirror, offline mode) apply;
it keeps unfinished downloads apart from finished ones. Only what verispec reads is fetched: no code, no pickles.
"""

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from verispec.errors import FetchError, InputError

ALLOWED_FILES = ("*.json", "*.safetensors", "*.jinja")
# Folders inside a repository hold other formats; Mistral's repositories have all weights a second time.
IGNORED_FILES = ("*/*", "consolidated*.safetensors")

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_ID_CHARS = 96
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json")
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model that is known by its Hugging Face id, which is also its name here: always the newest files, unpinned."""

    name: str
    nbytes: int  # of the weights, to the nearest 10 MB
    licence: str


_MODELS = (
    HubModel(name="Qwen/Qwen2.5-1.5B-Instruct", nbytes=3_090_000_000, licence="Apache-2.0"),
    HubModel(name="HuggingFaceTB/SmolLM2-1.7B-Instruct", nbytes=3_420_000_000, licence="Apache-2.0"),
)
HUB_MODELS: Mapping[str, HubModel] = MappingProxyType({model.name: model for model in _MODELS})


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hugging Face id. A path to a model file is none, although it may look like one."""
    if len(name) > _MAX_ID_CHARS or name.endswith((*_FILE_SUFFIXES, ".", "-", ".git")):
        return False
    return _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def fetch_snapshot(hub_id: str, progress: Callable[[str, int, int], None]) -> Path:
    """The folder of a model's newest files, fetched where they are not in the cache."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise InputError(
            f"{hub_id!r} is no existing path, and to fetch it from Hugging Face the package huggingface_hub is needed "
            "(pip install huggingface_hub)"
        ) from error
    progress("downloading", 0, 1)
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(ALLOWED_FILES), ignore_patterns=list(IGNORED_FILES)
        )
    except errors.GatedRepoError as error:  # a kind of RepositoryNotFoundError
        _fail(hub_id, "its owner grants access on request; ask for it there, then log in with `hf auth login`", error)
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{hub_id!r} is neither an existing path nor a model on Hugging Face that this user may see"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        _fail(hub_id, "it is not in the cache, and Hugging Face cannot be reached; is this machine offline?", error)
    except OSError as error:
        _fail(hub_id, "the disk is full" if error.errno == errno.ENOSPC else _reason(error), error)
    except Exception as error:  # the library has dozens of kinds, and its HTTP client more
        _fail(hub_id, _reason(error), error)
    progress("downloading", 1, 1)
    return Path(folder)


def cached_snapshot(model: HubModel) -> Path | None:
    """The folder of a known model in the library's cache; None if it is not there, or without its weights."""
    try:
        import huggingface_hub
    except ImportError:
        return None
    found = huggingface_hub.try_to_load_from_cache(model.name, "model.safetensors")  # linked there once it is whole
    return Path(found).parent if isinstance(found, str) else None


def _reason(error: Exception) -> str:
    """The first line of what a library says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MAX_REASON_CHARS]


def _fail(hub_id: str, reason: str, cause: Exception) -> NoReturn:
    raise FetchError(f"cannot fetch {hub_id} from Hugging Face: {reason}") from cause
