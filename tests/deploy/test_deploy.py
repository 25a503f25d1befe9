"""deploy/: what it says is well formed and safe, and what can be started of it without Docker or systemd starts."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.chat_model import write_chat_model
from verispec.cli.serve import Serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KEY = "a-key-for-deployment"
Steps = list[tuple[str, str]]


def steps_of(text: str) -> Steps:
    """The instructions of a Dockerfile, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    pairs = [line.split(None, 1) for line in lines if line.strip()]
    return [(name, rest) for name, rest in pairs]


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def complaints(steps: Steps) -> list[str]:
    """What a reviewer of Dockerfiles would say."""
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    found = [f"unknown instruction {name}" for name, _ in steps if name not in known]
    last = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    for _, image in (step for step in steps if step[0] == "FROM"):
        if not re.match(r"\S+:\d[\w.]*-slim\b", image):
            found.append(f"{image} is not a slim image of a fixed version")
    for _, command in (step for step in steps if step[0] == "RUN"):
        if "apt-get install" in command and not ("--no-install-recommends" in command and "rm -rf" in command):
            found.append("apt-get leaves more behind than is needed")
        if "pip install" in command and "--no-cache-dir" not in command:
            found.append("pip leaves its cache behind")
    names = [name for name, _ in last]
    users = [rest for name, rest in last if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("it runs as root")
    if "HEALTHCHECK" not in names:
        found.append("it has no health check")
    for name, rest in last:
        if name in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            found.append(f"{name} runs in a shell, which keeps signals from it")
    return found


def test_the_dockerfile_is_slim_and_not_root() -> None:
    steps = steps_of(dockerfile())
    assert complaints(steps) == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for _, rest in (step for step in steps if step[0] == "COPY" and "--from" not in step[1]):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source


@pytest.mark.parametrize(("old", "new"), [
    ("-slim", ""), ("USER verispec\n", ""), ("USER verispec", "USER root"), ("HEALTHCHECK", "EXPOSE"),
    ('ENTRYPOINT ["verispec"]', "ENTRYPOINT verispec"), ("--no-install-recommends", ""), ("--no-cache-dir ", ""),
    ("EXPOSE", "EXPOZE"),
])  # fmt: skip
def test_control_the_check_finds_what_is_wrong_with_one(old: str, new: str) -> None:
    assert old in dockerfile()
    assert complaints(steps_of(dockerfile().replace(old, new)))


def test_the_compose_file_fits_the_dockerfile() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (service,) = found["services"].values()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    last = dict(steps_of(dockerfile()))
    assert service["ports"] == [f"{last['EXPOSE']}:{last['EXPOSE']}"]
    ((volume, _, target),) = [each.partition(":") for each in service["volumes"]]
    assert volume in found["volumes"]
    assert f"XDG_CACHE_HOME={target}" in last["ENV"]
    assert set(service["secrets"]) == set(found["secrets"])
    assert f"/run/secrets/{service['secrets'][0]}" in json.loads(last["CMD"])
    assert float(service["stop_grace_period"].removesuffix("s")) > Serving.drain + 5
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters="=", interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "verispec.service")
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize(("old", "new", "is_good"), [("", "", True), ("Restart=", "Restrat=", False)])
def test_systemd_takes_the_unit(tmp_path: Path, old: str, new: str, is_good: bool) -> None:
    text = (DEPLOY / "verispec.service").read_text().replace("/opt/verispec/bin/verispec", "/bin/true")
    (tmp_path / "verispec.service").write_text(text.replace(old, new) if old else text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "verispec.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0 and not done.stderr) is is_good, done.stderr


def unit_command() -> list[str]:
    return shlex.split(unit()["Service"]["ExecStart"])


def docker_command() -> list[str]:
    last = dict(steps_of(dockerfile()))
    return json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])


def health_command() -> list[str]:
    return json.loads(dict(steps_of(dockerfile()))["HEALTHCHECK"].partition("CMD ")[2])


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command as it is written, but for its paths and its port, and with a tiny model."""
    (folder / "api-keys").write_text(f"{KEY}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = {"/run/secrets": str(folder), "${CREDENTIALS_DIRECTORY}": str(folder)}
    words = [re.sub("|".join(map(re.escape, changes)), lambda m: changes[m[0]], word) for word in command[1:]]
    words[words.index("--port") + 1] = str(port)
    model = write_chat_model(folder / "tiny.gguf")
    process = subprocess.Popen(
        [sys.executable, "-m", "verispec", *words, "-m", str(model)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process, port
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", [unit_command(), docker_command()], ids=["systemd", "docker"])
def test_what_they_start_serves_is_healthy_and_stops(command: list[str], tmp_path: Path) -> None:
    with started(command, tmp_path) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"x-api-key": KEY}).status_code == 200
        program, *rest = health_command()
        assert program == "python"
        health = [sys.executable, *(word.replace(":8000", f":{port}") for word in rest)]
        assert subprocess.run(health, capture_output=True, check=False).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(float(unit()["Service"]["TimeoutStopSec"])) == 0
        assert subprocess.run(health, capture_output=True, check=False).returncode != 0  # control


def test_the_unit_restarts_what_failed_and_runs_as_nobody() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"  # the engine's death is exit code 1, SIGTERM 0
    assert service["DynamicUser"] == "yes"
    assert float(service["TimeoutStopSec"]) > Serving.drain + 5
    assert service["Environment"] == f"XDG_CACHE_HOME=/var/lib/{service['StateDirectory']}"
