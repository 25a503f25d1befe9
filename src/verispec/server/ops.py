"""What operators ask: is it alive, is it ready, what does it do, which models and which version."""

from __future__ import annotations

from typing import Any

from verispec import __version__
from verispec.engine.thread import Status
from verispec.server.core import Core
from verispec.server.http import Received, Reply, json_reply
from verispec.server.metrics import CONTENT_TYPE

HUNG_SECONDS = 10.0
HUNG_TIMES = 10  # as long as the pass was predicted to take
STALLED_SECONDS = 60.0
STALLED_TIMES = 10  # as long as the longest prompt takes to be read


def patience(status: Status, *, least: float) -> float:
    """How many seconds a step may take."""
    return max(least, HUNG_TIMES * status.predicted_seconds)


def trouble(core: Core) -> str | None:
    """What is wrong with the engine, if anything is: it is dead, a step hangs, or steps commit nothing."""
    if (failure := core.failure) is not None:
        return f"the engine has failed: {failure}"
    status = core.llm.status()
    if status.step_seconds > patience(status, least=HUNG_SECONDS):
        return f"a step has been running for {status.step_seconds:.0f} seconds"
    silent = core.silent_seconds()
    has_work = status.num_running + status.num_waiting > 0  # an ingress may have requests and no replica yet
    if has_work and silent > max(STALLED_SECONDS, STALLED_TIMES * _prompt_seconds(core)):
        return f"there are requests, and nothing was committed for {silent:.0f} seconds"
    return None


def _prompt_seconds(core: Core) -> float:
    """How long the longest prompt should take to be read, which commits nothing before its end."""
    num_rows = min(core.llm.max_len, core.llm.row_budget)
    seconds = core.llm.calibration.cost.seconds(num_rows, num_rows * core.llm.max_len // 2)
    return seconds * core.llm.max_len / num_rows


async def health(core: Core, received: Received) -> Reply:
    """200 while the engine works."""
    wrong = trouble(core)
    return json_reply({"status": "ok" if wrong is None else wrong}, status=200 if wrong is None else 503)


async def ready(core: Core, received: Received) -> Reply:
    """200 while requests are taken."""
    wrong = "the server is stopping" if core.is_draining else trouble(core)
    return json_reply({"status": "ready" if wrong is None else wrong}, status=200 if wrong is None else 503)


async def metrics(core: Core, received: Received) -> Reply:
    """For Prometheus."""
    return Reply(core.metrics.text(), content_type=CONTENT_TYPE.encode())


async def version(core: Core, received: Received) -> Reply:
    """Which software, and which numbers."""
    return json_reply({"version": __version__, "profile": core.profile, "system_fingerprint": core.fingerprint})


async def models(core: Core, received: Received) -> Reply:
    """The names this model is served under."""
    return json_reply({"object": "list", "data": [_model(core, name) for name in core.names]})


async def model(core: Core, received: Received) -> Reply:
    """One of them."""
    return json_reply(_model(core, core.check_model(received.request.path_params["name"])))


def _model(core: Core, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": core.started,
        "owned_by": "verispec",
        "root": core.llm.identity.name,
        "max_model_len": core.llm.max_len,
        "verispec": {"drafters": list(core.llm.drafter_names), "system_fingerprint": core.fingerprint},
    }
