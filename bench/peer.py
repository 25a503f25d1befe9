"""llama-server on the same model as ours, for as long as it is asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from verispec.model import resolve

SLOT_TOKENS = 512  # prompt and answer of a sequence


class Peer(NamedTuple):
    port: int
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """What it has used so far (Linux)."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Its answers to requests that come at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self._complete, bodies))

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def running_peer(
    program: str, model: str, *, num_slots: int, threads: int, options: Sequence[str] = ()
) -> Iterator[Peer]:
    """Once it is ready."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "-m", str(resolve(model)), "--port", str(port), "-t", str(threads), "-np", str(num_slots)]
    process = subprocess.Popen(
        [*command, "-c", str(SLOT_TOKENS * num_slots), "--no-webui", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(process, port)
        yield Peer(port, process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:  # it is loading
            time.sleep(0.2)
    raise SystemExit(f"{process.args} ended with exit code {process.returncode}")
