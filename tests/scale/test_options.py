"""The application as it is asked for, without a cluster: what `serve run` is told, and when replicas are added."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

import verispec.ray
from verispec.errors import InputError
from verispec.ray.serving import Options, QueuePolicy, app, wanted_replicas


def test_what_is_typed_behind_serve_run() -> None:
    given = {"model": "m.gguf", "replicas": "2", "cross_check": "0.5", "insecure": "true"}
    assert Options.parse(given) == Options(model="m.gguf", replicas=2, cross_check=0.5, insecure=True)
    built = build(verispec.ray.app, given)
    assert built._bound_deployment.name == "ingress"
    engine = built._bound_deployment.init_args[0]._bound_deployment
    assert (engine.name, engine.num_replicas) == ("engine", 2)


@pytest.mark.parametrize(("given", "what"), [
    ({"replica": 2}, "unknown option 'replica'"), ({"replicas": "two"}, "replicas must be of type int"),
    ({"cross_check": 2.0}, "cross_check"), ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
])  # fmt: skip
def test_what_cannot_be_is_refused(given: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        app(given)


def test_replicas_follow_what_the_engines_have_to_do() -> None:
    assert [wanted_replicas(n, 2, target_load=10) for n in (0, 7, 17, 20, 21, 95)] == [0, 1, 2, 2, 3, 10]
    context = SimpleNamespace(
        aggregated_metrics={"num_samples": {"a": 30.0, "b": 12.0}}, total_queued_requests=3, current_num_replicas=2
    )
    assert QueuePolicy(target_load=10)(context) == (5, {})
    scaled = app(model="m.gguf", replicas=1, max_replicas=4, target_load=7)
    engine = scaled._bound_deployment.init_args[0]._bound_deployment
    config = engine._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (1, 4)
    assert config.policy.policy_kwargs == {"target_load": 7}
