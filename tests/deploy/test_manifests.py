"""The manifests for Kubernetes, KubeRay and SkyPilot: every field is one their schemas have, and they fit together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from verispec.cli.serve import Serving

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()

# The part of each schema that is used: a dict has these fields and no others, `!` marks those that must be there; a
# list has items of one kind; a type is that type; a set names the values; ANY is free.
ANY = object()
TEXTS = {str: str}
PROBE = {"httpGet!": {"path!": str, "port!": (str, int)}, "periodSeconds": int, "timeoutSeconds": int,
         "failureThreshold": int}  # fmt: skip
CONTAINER = {
    "name!": str, "image!": str, "args": [str], "ports": [{"name": str, "containerPort!": int}],
    "resources!": {"requests": TEXTS, "limits!": TEXTS},
    "startupProbe": PROBE, "livenessProbe": PROBE, "readinessProbe": PROBE,
    "securityContext": {"allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool,
                        "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}  # fmt: skip
POD = {
    "metadata": {"labels": TEXTS, "annotations": TEXTS},
    "spec!": {
        "terminationGracePeriodSeconds": int, "containers!": [CONTAINER],
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int, "seccompProfile": {"type!": str}},
        "volumes": [{"name!": str, "emptyDir": {}, "secret": {"secretName!": str}}],
    },
}  # fmt: skip
GROUP = {"rayStartParams!": TEXTS, "template!": POD}
KINDS: dict[str, Any] = {
    "Deployment": {
        "apiVersion!": {"apps/v1"}, "kind!": str, "metadata!": {"name!": str, "labels": TEXTS},
        "spec!": {
            "replicas": int, "selector!": {"matchLabels!": TEXTS}, "template!": POD,
            "strategy": {"rollingUpdate": {"maxUnavailable": int, "maxSurge": int}},
        },
    },
    "Service": {
        "apiVersion!": {"v1"}, "kind!": str, "metadata!": {"name!": str},
        "spec!": {"selector!": TEXTS, "ports!": [{"name": str, "port!": int, "targetPort": (str, int)}]},
    },
    "RayService": {
        "apiVersion!": {"ray.io/v1"}, "kind!": str, "metadata!": {"name!": str},
        "spec!": {
            "serveConfigV2!": str,
            "rayClusterConfig!": {
                "rayVersion": str, "headGroupSpec!": GROUP,
                "workerGroupSpecs!": [{**GROUP, "groupName!": str, "replicas": int, "minReplicas!": int,
                                       "maxReplicas!": int}],
            },
        },
    },
    "SkyPilot": {
        "name": str, "envs": TEXTS, "setup": str, "run!": str,
        "resources!": {"accelerators": {str: int}, "ports": (int, str), "disk_size": int},
        "service": {
            "readiness_probe!": {"path!": str, "initial_delay_seconds": int},
            "replica_policy!": {"min_replicas!": int, "max_replicas": int, "target_qps_per_replica": (int, float)},
        },
    },
    "Serve": {"applications!": [{"name": str, "import_path!": str, "route_prefix": str, "args": ANY}]},
}  # fmt: skip


def complaints(value: Any, schema: Any, place: str = "") -> list[str]:
    if schema is ANY:
        return []
    if isinstance(schema, set):
        return [] if value in schema else [f"{place}: {value!r} is none of {sorted(schema)}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{place} is no list"]
        return [c for i, each in enumerate(value) for c in complaints(each, schema[0], f"{place}[{i}]")]
    if not isinstance(schema, dict):
        kinds = schema if isinstance(schema, tuple) else (schema,)
        return [] if type(value) in kinds else [f"{place}: {value!r} is of another type"]
    if not isinstance(value, dict):
        return [f"{place} is no mapping"]
    if str in schema:
        return [c for k, each in value.items() for c in complaints(each, schema[str], f"{place}.{k}")]
    known = {name.rstrip("!"): each for name, each in schema.items()}
    found = [f"{place}.{name} is missing" for name in schema if name.endswith("!") and name[:-1] not in value]
    for name, each in value.items():
        found += complaints(each, known[name], f"{place}.{name}") if name in known else [f"{place}.{name} is unknown"]
    return found


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kind_of(document: dict[str, Any]) -> str:
    return document.get("kind", "SkyPilot")


FILES = ["kubernetes.yaml", "rayservice.yaml", "skypilot.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_every_field_is_of_the_schema(name: str) -> None:
    assert [c for each in documents(name) for c in complaints(each, KINDS[kind_of(each)])] == []


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    if kind_of(document) == "Deployment":
        return [spec["template"]["spec"]]
    cluster = spec["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_mounts_have_volumes_and_services_have_pods() -> None:
    deployment, service = documents("kubernetes.yaml")
    for pod in pods(deployment) + pods(documents("rayservice.yaml")[0]):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            requested, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requested["memory"] == limits["memory"]
            assert requested.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (pod,), (port,) = pods(deployment), service["spec"]["ports"]
    (container,) = pod["containers"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}
    assert pod["terminationGracePeriodSeconds"] > Serving.drain + 5
    assert f"--uid {pod['securityContext']['runAsUser']}" in DOCKERFILE
    assert {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")} == {
        "startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}  # fmt: skip
    assert all(f"EXPOSE {each['containerPort']}" in DOCKERFILE for each in container["ports"])


def test_what_serve_is_told() -> None:
    (document,) = documents("rayservice.yaml")
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    assert complaints(config, KINDS["Serve"]) == []
    (application,) = config["applications"]
    assert application["import_path"] == "verispec.ray:app"
    workers = document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (application["args"]["replicas"], application["args"]["max_replicas"]) == (
        workers["minReplicas"], workers["maxReplicas"])  # fmt: skip
    mounts = [m["mountPath"] for pod in pods(document) for c in pod["containers"] for m in c["volumeMounts"]]
    assert application["args"]["api_key_file"].rpartition("/")[0] in mounts


CHANGES = {
    "kubernetes.yaml": [("spec", "replica", 2), ("spec", "selector", None), ("kind", None, "Pod")],
    "rayservice.yaml": [("spec", "rayClusterConfig", {}), ("spec", "serveConfigV2", 3)],
    "skypilot.yaml": [("resources", "accelerator", {}), ("run", None, None)],
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, all_ in CHANGES.items() for change in all_])
def test_control_the_check_finds_what_is_wrong(name: str, change: tuple[str, str | None, Any]) -> None:
    document = copy.deepcopy(documents(name)[0])
    kind, (section, field, value) = kind_of(document), change
    place = document if field is None else document[section]
    if value is None:
        del place[field or section]
    else:
        place[field or section] = value
    schema = KINDS[kind] if section != "kind" else {**KINDS[kind], "kind!": {kind}}
    assert complaints(document, schema)
