"""`docker/kubernetes.yaml` against the schema of the Kubernetes API, and our configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from recipes.config import Config, compose, register_schema
from recipes.rendezvous import secret
from recipes.topology import NodeIdentity, find_node

ROOT = Path(__file__).resolve().parents[2]
# From the first in which all that is used is stable (podFailurePolicy).
VERSIONS = ("1.31", kubernetes_validate.latest_version())


@pytest.fixture
def service() -> dict[str, Any]:
    return _resource("Service")


@pytest.fixture
def job() -> dict[str, Any]:
    return _resource("Job")


def _resource(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text())
    (found,) = (each for each in documents if each["kind"] == kind)
    assert isinstance(found, dict)
    return found


def _container(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_accepts_it(version: str, service: dict[str, Any], job: dict[str, Any]) -> None:
    for resource in (service, job):
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_schema_refuses_what_is_wrong(job: dict[str, Any]) -> None:
    for path, value in (
        (("spec", "completionsMode"), "Indexed"),
        (("spec", "parallelism"), "two"),
        (("spec", "podFailurePolicy", "rules"), [{"onExitCodes": {"values": [1]}}]),
    ):
        wrong = copy.deepcopy(job)
        target = wrong
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_its_command_composes_and_fits_the_job(job: dict[str, Any]) -> None:
    container = _container(job)
    program, *overrides = container["args"]
    assert program == "train.py"
    register_schema()
    # Of no effect on CPU, where this test runs, and refused there.
    config, _ = compose(ROOT / "conf", [*overrides, "amp=off"])
    assert isinstance(config, Config)
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == config.topology.nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == config.topology.devices


def test_each_pod_finds_its_number_and_node_0(job: dict[str, Any], service: dict[str, Any]) -> None:
    # A pod of an indexed Job is called JOB-INDEX, and the Service gives it JOB-INDEX.SERVICE.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    given = _container(job)["env"]
    environment = {each["name"]: each["value"] for each in given if "value" in each}
    master = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    for index in range(job["spec"]["completions"]):
        found = find_node(None, None, environment | {"JOB_COMPLETION_INDEX": str(index)})
        assert found == NodeIdentity(index, master, None)


def test_every_pod_gets_the_secret_and_the_file_holds_none(job: dict[str, Any]) -> None:
    text = (ROOT / "docker" / "kubernetes.yaml").read_text()
    (given,) = (each for each in _container(job)["env"] if each["name"] == secret.VARIABLE)
    wanted = given["valueFrom"]["secretKeyRef"]
    assert given.keys() == {"name", "valueFrom"}
    made = f"kubectl create secret generic {wanted['name']} --from-literal={wanted['key']}="
    assert made in text
    assert "kind: Secret" not in text


def test_every_volume_is_mounted_and_shared_memory_is_memory(job: dict[str, Any]) -> None:
    volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in _container(job)["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    (shared,) = (name for name, path in mounts.items() if path == "/dev/shm")
    assert volumes[shared]["emptyDir"]["medium"] == "Memory"
