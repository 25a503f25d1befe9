"""The server as a Ray Serve application: an ingress with our ASGI application, and replicas with the model.

    serve run verispec.ray:app model=smollm2-135m replicas=2

Ray starts and watches replicas and decides, through `PrefixRouter`, who gets a request; tokens come back over a socket
of our own (`channel`). Everything that keeps an answer whole when a replica is lost is in `remote`, which knows no Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingContext, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from verispec.arguments import check_int, check_number
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM
from verispec.model import DEFAULT_MODEL
from verispec.ray.channel import SILENCE_SECONDS, Hub
from verispec.ray.prefixes import PrefixIndex, ranked
from verispec.ray.remote import Dispatcher, RemoteLLM, ReplicaLostError
from verispec.ray.replica import Card, Outcome, Replica, Work
from verispec.server.app import make_app
from verispec.server.core import Core
from verispec.server.settings import Settings

ENGINE = "engine"
INGRESS = "ingress"
HEALTH_SECONDS = 5.0
_CARD_SECONDS = 1.0  # between two questions for the card
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of an application; times are in seconds.

    `replicas` is how many models there are, `max_replicas` the most that autoscaling may start: it keeps about
    `target_load` samples, running or waiting, on each, and `autoscaling` are further fields of Ray's AutoscalingConfig,
    such as its delays. `llm` are further options of LLM. `cross_check` is the share of
    requests that are drawn on two replicas. A replica whose fingerprint is not `fingerprint` does not start; without
    one, the first replica that is found decides. `ingresses` are the processes that speak HTTP. `silence` is how long
    nothing may be heard of a replica until its streams go on elsewhere. `gpus`, `cpus` and `resources` are what Ray
    sets aside for a replica, `ingress_resources` for an ingress.
    """

    model: str = DEFAULT_MODEL
    replicas: int = 1
    max_replicas: int = 0
    target_load: float = 24.0
    autoscaling: Mapping[str, Any] = field(default_factory=dict)
    ingresses: int = 1
    llm: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    cross_check: float = 0.01
    prefix_routing: bool = True
    served_name: str = ""
    api_key_file: str = ""
    insecure: bool = False
    max_waiting: int = 4096
    timeout: float = 600.0
    drain: float = 30.0
    silence: float = SILENCE_SECONDS
    metrics_prefix: str = "verispec"
    gpus: float = 0.0
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    ingress_resources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """From what was typed behind `serve run`, where everything is text, or written in a configuration."""
        kinds = {one.name: str(one.type) for one in fields(cls)}
        if unknown := sorted(set(given) - set(kinds)):
            raise InputError(f"unknown option {unknown[0]!r}; known: {', '.join(kinds)}")
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in given.items()})

    def __post_init__(self) -> None:
        check_int("replicas", self.replicas, 0, 2**20)
        check_int("ingresses", self.ingresses, 1, 2**20)
        check_number("cross_check", self.cross_check, 0, 1)
        check_number("silence", self.silence, 0, 1e6, low_open=True)
        if self.max_replicas and self.max_replicas < self.replicas:
            raise InputError(f"max_replicas = {self.max_replicas} is less than replicas = {self.replicas}")

    @property
    def load(self) -> dict[str, Any]:
        """What LLM is loaded with."""
        return {"model": self.model, **self.llm}

    @property
    def settings(self) -> Settings:
        """Of the server behind Serve's proxy."""
        return Settings(
            served_names=(self.served_name,) if self.served_name else (),
            api_keys=tuple(Path(self.api_key_file).read_text().split()) if self.api_key_file else (),
            is_insecure=self.insecure,
            max_waiting=self.max_waiting,
            timeout=self.timeout,
            drain=self.drain,
            metrics_prefix=self.metrics_prefix,
        )


def _typed(name: str, value: Any, kind: str) -> Any:
    if not isinstance(value, str) or kind.startswith("str"):
        return value
    try:
        return (
            {"true": True, "false": False}[value.lower()]
            if kind == "bool"
            else {"int": int, "float": float}[kind](value)
        )
    except (KeyError, ValueError):
        raise InputError(f"{name} must be of type {kind}, not {value!r}") from None


class EngineDeployment:
    """A replica under Ray's care."""

    def __init__(self, load: Mapping[str, Any], fingerprint: str | None) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, LLM(**load), load)
        self._replica.check_fingerprint(fingerprint)

    async def card(self) -> Card:
        return self._replica.card()

    async def run(self, work: Work) -> Outcome:
        return await self._replica.run(work)

    def check_health(self) -> None:
        """Serve starts another replica where this raises."""
        if (wrong := self._replica.trouble()) is not None:
            raise VerispecError(wrong)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `QueuePolicy` goes by."""
        load = self._replica.load()
        return {"num_samples": float(load.num_running + load.num_waiting)}

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.close()


class RayFleet:
    """Replicas behind a handle of Serve's."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine

    async def run(self, work: Work) -> Outcome:
        try:
            found: Outcome = await self._engine.run.remote(work)
            return found
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"a replica is gone: {type(error).__name__}") from error

    async def card(self, load: Mapping[str, Any]) -> Card:
        """The card of a replica that was loaded with these options, once there is one."""
        while True:
            try:
                card: Card = await self._engine.card.remote()
                if card.options == load:
                    return card
            except (RayError, RayServeException) as error:
                logger.warning("no replica answers yet: %s", error)
            await asyncio.sleep(_CARD_SECONDS)


@serve.ingress()
class IngressDeployment:
    """The server, on a model that is elsewhere."""

    async def __init__(self, engine: DeploymentHandle, options: Options) -> None:  # type: ignore[misc]
        fleet = RayFleet(engine)
        card = await fleet.card(options.load)
        hub = Hub(silence=options.silence)
        dispatcher = Dispatcher(
            card,
            fleet,
            hub,
            await hub.listen(ray.util.get_node_ip_address()),
            cross_check=options.cross_check,
            metrics_prefix=options.metrics_prefix,
        )
        core = Core(RemoteLLM(card, dispatcher), options.settings)
        core.metrics.add(dispatcher)
        self._app = make_app(core)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica that was sent the longest beginning of the prompt, unless it is too busy; never asks those
    that were refused. Runs inside the ingress.
    """

    def initialize_state(self, *, prefers_prefix: bool = True) -> None:
        self._index = PrefixIndex()
        self._prefers_prefix = prefers_prefix

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        work = _work(pending_request)
        refused = work.refused if work is not None else frozenset()
        able = {r.replica_id.unique_id: r for r in candidate_replicas if r.replica_id.unique_id not in refused}
        loads = {name: self.replica_queue_len_cache.get(r.replica_id) or 0 for name, r in able.items()}
        keys = work.prefix_keys if work is not None and self._prefers_prefix else ()
        ranks = ranked(self._index, keys, loads, work.avoid if work is not None else ())
        return [[able[name] for name in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (work := _work(pending_request)) is not None:
            self._index.note(work.prefix_keys, replica_id.unique_id)


def _work(request: PendingRequest | None) -> Work | None:
    return next((arg for arg in request.args if isinstance(arg, Work)), None) if request is not None else None


class QueuePolicy:
    """Autoscaling by what the engines have to do: so many replicas that each has `target_load` samples."""

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        loads = (context.aggregated_metrics or {}).get("num_samples", {})
        num_samples = sum(loads.values()) + (context.total_queued_requests or 0)
        return wanted_replicas(num_samples, context.current_num_replicas, self._target_load), {}


def wanted_replicas(num_samples: float, num_replicas: int, target_load: float) -> int:
    """How many replicas so many samples need. Fewer than there are only when a fifth would still be to spare."""
    needed = -(-num_samples // target_load)
    spare = -(-num_samples // (0.8 * target_load))
    return int(needed if needed >= num_replicas else min(num_replicas, spare))


def app(args: Mapping[str, Any] | None = None, **options: Any) -> serve.Application:
    """The application, for `serve.run`, or for `serve run verispec.ray:app`; `Options` says what can be given."""
    chosen = Options.parse({**(args or {}), **options})
    scaling: dict[str, Any] = {"num_replicas": chosen.replicas}
    if chosen.max_replicas:
        policy = {
            "policy_function": "verispec.ray.serving:QueuePolicy",
            "policy_kwargs": {"target_load": chosen.target_load},
        }
        bounds = {"min_replicas": chosen.replicas, "max_replicas": chosen.max_replicas}
        scaling = {"num_replicas": None, "autoscaling_config": {**chosen.autoscaling, **bounds, "policy": policy}}
    router = RequestRouterConfig(
        request_router_class="verispec.ray.serving.PrefixRouter",
        request_router_kwargs={"prefers_prefix": chosen.prefix_routing},
    )
    common = {"health_check_period_s": HEALTH_SECONDS, "graceful_shutdown_timeout_s": chosen.drain}
    engine = serve.deployment(EngineDeployment, name=ENGINE).options(
        **scaling,
        **common,
        max_ongoing_requests=chosen.max_waiting,
        request_router_config=router,
        ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus, "resources": dict(chosen.resources)},
    )
    ingress = serve.deployment(IngressDeployment, name=INGRESS).options(
        **common,
        num_replicas=chosen.ingresses,
        max_ongoing_requests=chosen.max_waiting,
        ray_actor_options={"num_cpus": 0, "resources": dict(chosen.ingress_resources)},
    )
    # The ingress has the options too, so that other ones start it anew: its card would be of a model that is gone.
    return ingress.bind(engine.bind(chosen.load, chosen.fingerprint), chosen)


# `serve run` takes functions of one argument only.
app.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("args", inspect.Parameter.POSITIONAL_ONLY, annotation=dict)]
)
