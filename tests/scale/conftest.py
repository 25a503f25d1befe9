"""A cluster of Ray nodes on this machine: one with the ingress, two with a replica each, which come and go."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from verispec.llm import LLM
from verispec.model import DEFAULT_MODEL, resolve

OBJECT_STORE_NBYTES = 80_000_000
MODEL = {"threads": 1, "drafter": "ngram"}
START_ATTEMPTS = 3
PATIENCE = {  # seconds that Serve waits for its proxy: on a busy machine it kills one that has hardly begun
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Who does not ask for this folder never imports Ray, also where it is installed."""
    return None if any("scale" in arg for arg in config.args) else True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Farm:
    """The cluster, with the application on it."""

    def __init__(self) -> None:
        os.environ.update(PATIENCE)  # before Ray is imported, and for the processes that it starts
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._add({"front": 1.0})
        self.engines = [self._add({"engine": 1.0}) for _ in range(2)]
        ray.init(address=self._cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"port": port, "location": "HeadOnly"})
        self.url = f"http://127.0.0.1:{port}"
        self.address = self._cluster.address
        self.run()

    def run(self, **options: Any) -> None:
        """The application with these options, instead of what runs."""
        from ray import serve

        from verispec.ray import app

        given = {"model": str(resolve(DEFAULT_MODEL)), "replicas": 2, "llm": MODEL, "insecure": True, "drain": 20.0,
                 "resources": {"engine": 1.0}, "ingress_resources": {"front": 0.01}, "cpus": 0.1, "silence": 10.0,
                 "cross_check": 0.0, **options}  # fmt: skip
        serve.run(app(given))

    def stop(self) -> None:
        """What runs: replicas of another kind need its places."""
        from ray import serve

        serve.delete("default")

    def replace_node(self) -> float:
        """Lose a node at once; another one comes. Returns when it was lost."""
        lost = self.engines.pop(0)
        lost_at = time.monotonic()
        self._cluster.remove_node(lost, allow_graceful=False)
        return lost_at

    def add_node(self) -> None:
        """And wait for its replica."""
        self.engines.append(self._add({"engine": 1.0}))
        self.wait_for_replicas(2)

    def wait_for_replicas(self, num: int) -> None:
        deadline = time.monotonic() + 120
        while (states := self.replica_states) != {"RUNNING": num}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the replicas are {states}")
            time.sleep(0.2)

    @property
    def replica_states(self) -> dict[str, int]:
        from ray import serve

        return dict(serve.status().applications["default"].deployments["engine"].replica_states)

    def pids(self, *titles: str) -> list[int]:
        """The processes of this cluster's nodes, and of no other's, whose titles begin so."""
        raylets = {each.process.pid for node in self._cluster.list_all_nodes() for each in node.all_processes["raylet"]}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in raylets and (folder / "cmdline").read_text(errors="replace").startswith(titles):
                    found.append(int(folder.name))
        return sorted(found)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf"^verispec:{name}_total (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def _add(self, resources: dict[str, float]) -> Any:
        for _ in range(START_ATTEMPTS - 1):
            with suppress(Exception):  # its agent did not start within Ray's 20 seconds: the machine is busy
                return self._add_once(resources)
        return self._add_once(resources)

    def _add_once(self, resources: dict[str, float]) -> Any:
        return self._cluster.add_node(
            num_cpus=4, object_store_memory=OBJECT_STORE_NBYTES, include_dashboard=False, resources=resources,
            **{name: free_port() for name in _PORTS},
        )  # fmt: skip


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    found = Farm()
    yield found
    found.close()


@pytest.fixture(scope="session")
def oracle() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, **MODEL) as llm:
        yield llm
