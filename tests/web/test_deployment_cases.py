"""How platforms interpret the deployment files: schemas, variables and commands. These tests start no server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from try_deb import of_unit
from try_image import settings

from notso.cli.app import _drop_service_links, app

DEPLOY = Path(__file__).parents[2] / "deploy"
SOURCES = Path(__file__).parents[2] / "src"
KUBERNETES = ("1.26", "1.30", "1.33")
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
SERVICES = ("notso", "notso-ollama", "notso-valkey", "notso-postgres", "notso-engine", "notso-metrics", "notso-https")
GIVEN = {"NOTSO_API_KEY": "a key of at least 16 characters", "NOTSO_MODEL": "Q4_K_M", "POSTGRES_PASSWORD": "secret"}


def named(document: Mapping[str, Any]) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_kubernetes_document_matches_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "three"),
        (("spec", "replica"), 3),
        (("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "http"),
        (("spec", "template", "spec", "containers", 0, "livenessProbe", "httpGet", "route"), "/livez"),
        (("spec", "template", "spec", "enableServiceLink"), False),
        (("spec", "strategy", "rollingUpdate", "maxSurge"), [1]),
    ],
)
def test_kubernetes_schema_rejects_invalid_field(path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(json.dumps(DOCUMENTS[0]))
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)


@cache
def group() -> Any:
    return typer.main.get_command(app)


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line and the environment as the program does. Raise click's errors."""
    command = group().commands[words[0]]
    values: dict[str, Any] = command.make_context(words[0], list(words[1:])).params
    return values


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
@pytest.mark.parametrize("service", SERVICES)
def test_service_link_variables_do_not_change_settings(
    service: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes adds such variables to every pod of a namespace, and Docker does so for linked containers."""
    name, port = service.upper().replace("-", "_"), "80"
    links = {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": port,
        f"{name}_SERVICE_PORT_HTTP": port,
        f"{name}_PORT": f"{scheme}://10.0.0.1:{port}",
        f"{name}_PORT_{port}_{scheme.upper()}": f"{scheme}://[fd00::1]:{port}",
        f"{name}_PORT_{port}_{scheme.upper()}_PROTO": scheme,
        f"{name}_PORT_{port}_{scheme.upper()}_PORT": port,
        f"{name}_PORT_{port}_{scheme.upper()}_ADDR": "10.0.0.1",
    }
    before = parsed(["serve"])
    for variable, value in links.items():
        monkeypatch.setenv(variable, value)
    _drop_service_links()
    assert parsed(["serve"]) == before
    monkeypatch.setenv("NOTSO_PORT", "3001")  # a port that the operator has configured
    _drop_service_links()
    assert parsed(["serve"])["port"] == 3001


def image(name: str) -> tuple[list[str], dict[str, str]]:
    """Return an image's arguments after `notso`, and its variables."""
    said = settings((DEPLOY / name).read_text())
    variables = dict(each.split("=") for each in said["ENV"].split())
    entry = json.loads(said["ENTRYPOINT"])
    assert entry[-1] == "notso"
    return json.loads(said["CMD"]), variables


def starts() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the name, arguments and variables of every command in a deployment file."""
    for name in ("Containerfile", "Containerfile.front", "Containerfile.replica"):
        yield (name, *image(name))
    for name in ("compose.yaml", "compose.cluster.yaml"):
        for service, held in yaml.safe_load((DEPLOY / name).read_text())["services"].items():
            if "build" in held:
                words, variables = image(Path(held["build"]["dockerfile"]).name)
                yield f"{name} {service}", held.get("command") or words, variables | held.get("environment", {})
                check = held.get("healthcheck", {}).get("test")
                if check:
                    yield f"{name} {service} healthcheck", check[check.index("notso") + 1 :], variables
    for document in DOCUMENTS:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            if container["image"].startswith("notso"):
                _, variables = image(f"Containerfile.{container['image'].removeprefix('notso-')}")
                more = {each["name"]: each["value"] for each in container.get("env", ())}
                yield f"kubernetes.yaml {container['name']}", container["args"], variables | more
    words, variables, _ = of_unit((DEPLOY / "notso.service").read_text())
    yield "notso.service", words[1:], variables


@cache
def variables_known() -> set[str]:
    """Return every environment variable that the sources read."""
    return {name for path in SOURCES.rglob("*.py") for name in re.findall(r'"(NOTSO_[A-Z_]+)"', path.read_text())}


@pytest.mark.parametrize(("words", "variables"), [pytest.param(*rest, id=name) for name, *rest in starts()])
def test_deployed_command_and_variables_are_valid(
    words: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (variables | GIVEN).items():
        assert not name.startswith("NOTSO_") or name in variables_known(), name
        if not value.startswith("${"):
            monkeypatch.setenv(name, value)
    assert parsed(shlex.split(" ".join(map(shlex.quote, map(str, words)))))
