"""Start every service file of deploy/ as its platform does. Arguments, environment, start order and health checks come
from the file; the program is that of the working tree, and its folders lie below a temporary one."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import yaml
from try_deb import of_unit
from try_image import settings
from valkey_server import MISSING as NO_VALKEY
from valkey_server import PROGRAM as VALKEY
from valkey_server import ValkeyServer

from notso.smollm3.hub import registry
from notso.web.values.ids import new_id

DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = "a key of at least 16 characters"
MODEL = "their/Model:Q6_K"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "reasoning_effort": "none"}
HELD = ("NOTSO_", "DATABASE_URL", "VALKEY_URL", "HF_", "XDG_")


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {name})")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def filled(text: str, variables: Mapping[str, str]) -> str:
    """Substitute `${NAME}`, `${NAME:-default}` and `${NAME:?message}` as compose does."""

    def value(found: re.Match[str]) -> str:
        name, how, other = found.groups()
        if how == ":?":
            assert variables.get(name), f"{name}: {other}"
        return variables.get(name) or (other if how == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


class Machine:
    """Run the commands of containers and units, with private folders in place of /data, /models and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith(HELD)}
        return known | {name: self.path(value) if value.startswith("/") else value for name, value in given.items()}

    def path(self, path: str) -> str:
        return str(self.folder / path.lstrip("/"))

    def run(self, words: Sequence[str], given: Mapping[str, str]) -> None:
        """Run a command until it exits."""
        said = subprocess.run(
            [sys.executable, "-m", "notso", *words], env=self.environment(given), capture_output=True, text=True
        )
        assert said.returncode == 0, said.stderr

    def serve(self, words: Sequence[str], given: Mapping[str, str]) -> str:
        """Start a server on its own port, as in a container; return its address."""
        port = free_port()
        with (self.folder / f"log-{port}").open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "notso", *words],
                    env=self.environment(given | {"NOTSO_PORT": str(port)}),
                    stdout=log,
                    stderr=log,
                    text=True,
                )
            )
        return f"http://127.0.0.1:{port}"

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition; fail if one of the processes exits first."""
        while not condition():
            for process in self.processes:
                logs = "".join(each.read_text() for each in self.folder.glob("log-*"))
                assert process.poll() is None, logs[-2000:]
            time.sleep(0.02)

    def answers(self, url: str, headers: Mapping[str, str] | None = None) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, headers=headers, timeout=60).status_code == 200
        return False

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait() for process in self.processes]
        assert not any(codes), codes


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


@pytest.fixture
def model_at_the_hub(fake_hub: Any) -> Any:
    """Serve the demo model from a fake Hub under another owner's name."""
    fake_hub.content = registry.demo_path().read_bytes()
    size = len(fake_hub.content)
    large = {"size": size, "sha256": hashlib.sha256(fake_hub.content).hexdigest()}
    theirs = {"rfilename": "Their-Q6_K.gguf", "size": size, "lfs": large}
    fake_hub.listing = json.dumps({"id": "their/Model", "sha": "1" * 40, "siblings": [theirs]}).encode()
    return fake_hub


def variables_of(image: str) -> dict[str, str]:
    said = settings((DEPLOY / image).read_text())
    return dict(each.split("=") for each in said["ENV"].split())


def command_of(image: str, args: Sequence[str] | None = None) -> list[str]:
    """Return the arguments after `notso`."""
    said = settings((DEPLOY / image).read_text())
    entry = json.loads(said["ENTRYPOINT"])
    assert entry in (["notso"], ["python3", "-m", "notso"])
    return list(args) if args is not None else list(json.loads(said["CMD"]))


def require_answer(url: str, **headers: str) -> httpx.Response:
    answer = httpx.post(f"{url}/v1/chat/completions", json=ASKED, headers=headers, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
    return answer


def require_model(url: str, **headers: str) -> None:
    """Require that the configured model answers, not the built-in one."""
    props = httpx.get(f"{url}/props", headers=headers, timeout=60).json()
    assert props["model_path"].endswith("Their-Q6_K.gguf"), props["model_path"]


def test_compose_file_serves_configured_model(machine: Machine, model_at_the_hub: Any) -> None:
    text = filled((DEPLOY / "compose.yaml").read_text(), {"NOTSO_API_KEY": KEY, "NOTSO_MODEL": MODEL})
    (service,) = yaml.safe_load(text)["services"].values()
    image = Path(service["build"]["dockerfile"]).name
    given = variables_of(image) | service["environment"] | {"HF_ENDPOINT": model_at_the_hub.url}
    url = machine.serve(command_of(image, service.get("command")), given)
    check = json.loads(settings((DEPLOY / image).read_text())["HEALTHCHECK"].partition("CMD ")[2])
    machine.wait(lambda: machine.answers(f"{url}/health"))
    machine.run([url if word.startswith("http://") else word for word in check[1:]], given)
    require_answer(url, Authorization=f"Bearer {KEY}")
    require_model(url, Authorization=f"Bearer {KEY}")
    assert httpx.post(f"{url}/v1/chat/completions", json=ASKED).status_code == 401


def test_cluster_compose_file_serves_shared_chats(
    machine: Machine, model_at_the_hub: Any, postgres: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if VALKEY is None:
        pytest.skip(NO_VALKEY)
    given = {"NOTSO_API_KEY": KEY, "NOTSO_MODEL": MODEL, "POSTGRES_PASSWORD": "secret"}
    services = yaml.safe_load(filled((DEPLOY / "compose.cluster.yaml").read_text(), given))["services"]
    replicas = {name: each for name, each in services.items() if "serve" in each.get("command", ())}
    assert list(replicas) == ["one", "two", "three"]
    valkey = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    try:
        database, urls = postgres.new_database(), {}
        hub = {"HF_ENDPOINT": model_at_the_hub.url}
        for name in started_in_order(services):
            service = services[name]
            if "build" not in service:
                continue
            image = Path(service["build"]["dockerfile"]).name
            variables = variables_of(image) | service["environment"]
            if name not in replicas:
                machine.run(command_of(image, service["command"]), variables | hub)
                continue
            assert variables["DATABASE_URL"] == "postgresql://notso@postgres/notso", "or the password must be escaped"
            assert variables["PGPASSWORD"] == services["postgres"]["environment"]["POSTGRES_PASSWORD"] == "secret"
            assert variables["VALKEY_URL"] == "valkey://valkey", "the address of Valkey has no port"
            variables |= {"DATABASE_URL": database, "VALKEY_URL": valkey.url, "HF_HUB_OFFLINE": "1"}
            variables["NOTSO_DATA_DIR"] += f"/{name}"
            urls[name] = machine.serve(command_of(image, service["command"]), variables)
            machine.wait(lambda name=name: machine.answers(f"{urls[name]}/health"))  # type: ignore[misc]
        assert len(model_at_the_hub.gets) == 1, "the model is downloaded once for all services"
        with caddy(machine, urls) as proxy:
            headers = {"Authorization": f"Bearer {KEY}", "Host": "chat.example.com"}
            machine.wait(lambda: machine.answers(f"{proxy}/health", headers))
            require_answer(proxy, **headers)
            require_model(proxy, **headers)
            form = {"text": "Hello", "key": new_id()}
            asked = httpx.post(f"{proxy}/chats", data=form, headers=headers, timeout=60)
            assert asked.status_code == 303
            for url in urls.values():  # every replica finds the chat, because all share one database
                there = httpx.get(url + httpx.URL(asked.headers["location"]).path, headers=headers, timeout=60)
                assert there.status_code == 200
    finally:
        machine.close()
        machine.processes.clear()
        valkey.stop()


def started_in_order(services: Mapping[str, Any]) -> list[str]:
    """Return the service names ordered so that each follows its dependencies."""
    found: list[str] = []

    def add(name: str) -> None:
        for needed in services[name].get("depends_on") or ():
            assert needed in services
            add(needed)
        if name not in found:
            found.append(name)

    for name in services:
        add(name)
    return found


def test_kubernetes_file_serves_configured_model(
    machine: Machine, model_at_the_hub: Any, postgres: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if VALKEY is None:
        pytest.skip(NO_VALKEY)
    parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in parts
        if each["metadata"]["name"] == "notso" and each["kind"] == "Deployment"
    )
    (container,) = pod["containers"]
    claims = {each["metadata"]["name"] for each in parts if each["kind"] == "PersistentVolumeClaim"}
    volumes = {each["name"]: each for each in pod["volumes"]}
    for each in (*pod["initContainers"], container):
        assert {mount["name"] for mount in each["volumeMounts"]} <= set(volumes)
    assert {volumes["models"]["persistentVolumeClaim"]["claimName"]} == claims
    valkey = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    try:
        secret = {"NOTSO_API_KEY": KEY, "DATABASE_URL": postgres.new_database(), "VALKEY_URL": valkey.url}
        image, named = "Containerfile.replica", {"Q4_K_M": MODEL}
        for init in pod["initContainers"]:
            hub = {"HF_ENDPOINT": model_at_the_hub.url}
            machine.run([named.get(word, word) for word in init["args"]], variables_of(image) | hub)
        variables = {each["name"]: named.get(each["value"], each["value"]) for each in container["env"]}
        assert container["envFrom"] == [{"secretRef": {"name": "notso"}}]
        # `enableServiceLinks: false` disables these variables, but an operator may remove that line.
        links = {}
        for service in (each for each in parts if each["kind"] == "Service"):
            name = service["metadata"]["name"].upper().replace("-", "_")
            port = service["spec"]["ports"][0]["port"]
            links |= {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_SERVICE_PORT": str(port)}
            links |= {f"{name}_PORT_{port}_TCP": f"tcp://10.0.0.1:{port}", f"{name}_PORT": f"tcp://10.0.0.1:{port}"}
        assert "NOTSO_PORT" in links
        (port,) = container["ports"]
        assert port["containerPort"] == 3000
        url = machine.serve(container["args"], variables_of(image) | secret | links | variables)
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[name]["httpGet"]
            headers = {each["name"]: each["value"] for each in probe["httpHeaders"]}
            machine.wait(lambda: machine.answers(url + probe["path"], headers))  # noqa: B023
        require_answer(url, Authorization=f"Bearer {KEY}", Host="chat.example.com")
        require_model(url, Authorization=f"Bearer {KEY}")
        assert len(model_at_the_hub.gets) == 1
    finally:
        machine.close()
        machine.processes.clear()
        valkey.stop()


def test_front_end_image_serves_remote_engine(machine: Machine) -> None:
    key = {"NOTSO_ENGINE_KEY": KEY}
    of_engine = variables_of("Containerfile") | key | {"NOTSO_API_KEY": KEY}
    engine = machine.serve(["serve", "--no-browser", "--plain", "--engine-api"], of_engine)
    words = command_of("Containerfile.front")
    variables = variables_of("Containerfile.front") | key | {"NOTSO_ENGINE_URL": engine, "NOTSO_API_KEY": KEY}
    variables |= {"NOTSO_DATA_DIR": "/front", "PYTHONPATH": ":".join(filter(None, sys.path))}
    variables["HOME"] = "/front"
    environment = {name: value for name, value in variables.items() if name != "NOTSO_HOST"}
    machine.wait(lambda: machine.answers(f"{engine}/health"))
    url = machine.serve(words, environment)
    machine.wait(lambda: machine.answers(f"{url}/health"))
    require_answer(url, Authorization=f"Bearer {KEY}")


def test_systemd_unit_starts_server(machine: Machine) -> None:
    words, variables, _ = of_unit((DEPLOY / "notso.service").read_text())
    config = machine.folder / "etc" / "notso" / "config.toml"  # the distribution's package installs it there
    config.parent.mkdir(parents=True)
    shutil.copy(DEPLOY / "config.toml", config)
    url = machine.serve(words[1:], variables)
    machine.wait(lambda: machine.answers(f"{url}/health"))
    require_answer(url)


def test_homebrew_formula_is_valid() -> None:
    said = subprocess.run([program("ruby"), "-c", DEPLOY / "notso.rb"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "notso.service"
    unit.write_text((DEPLOY / "notso.service").read_text().replace("/usr/bin/notso", sys.executable))
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert said.returncode == 0 and "notso.service" not in said.stderr, said.stderr


# Requests through the proxies


@contextlib.contextmanager
def caddy(machine: Machine, urls: Mapping[str, str]) -> Iterator[str]:
    port = free_port()
    text = (DEPLOY / "Caddyfile").read_text().replace("chat.example.com {", f"http://chat.example.com:{port} {{")
    for name, url in urls.items():
        text = text.replace(f"{name}:3000", url.removeprefix("http://"))
    assert ":3000" not in text
    with proxied(["caddy", "run", "--adapter", "caddyfile", "--config"], "{\n\tadmin off\n}\n" + text, machine, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def haproxy(machine: Machine, urls: Mapping[str, str], *, faster: float = 1.0) -> Iterator[str]:
    port = free_port()
    text = (DEPLOY / "haproxy.cfg").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for number, url in enumerate(urls.values(), start=1):
        text = text.replace(f"127.0.0.1:300{number}", url.removeprefix("http://"))

    def shorter(found: re.Match[str]) -> str:
        milliseconds = int(found[2]) * {"s": 1000, "h": 3_600_000}[found[3]]
        return f"{found[1]} {max(1, int(milliseconds / faster))}ms"

    text = re.sub(r"(timeout [\w-]+) (\d+)([sh])", shorter, text)
    with proxied(["haproxy", "-db", "-f"], text, machine, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def proxied(words: Sequence[str], text: str, machine: Machine, port: int) -> Iterator[None]:
    file = machine.folder / "proxy.conf"
    file.write_text(text)
    environment = machine.environment({"HOME": "/proxy", "XDG_DATA_HOME": "/proxy", "XDG_CONFIG_HOME": "/proxy"})
    command = ["setpriv", "--pdeathsig", "KILL", program(words[0]), *words[1:], str(file)]
    with (machine.folder / "proxy-log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        while True:
            assert process.poll() is None, (machine.folder / "proxy-log").read_text()[-2000:]
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


class _Replica(http.server.BaseHTTPRequestHandler):
    """Stream events, each after the previous one has been read, or answer after `seconds` of silence."""

    protocol_version = "HTTP/1.1"
    read: ClassVar[threading.Semaphore]
    seconds: ClassVar[float] = 0.0

    def do_GET(self) -> None:
        self._answer(b"ok")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/whole"):
            time.sleep(self.seconds)
            self._answer(b"whole")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        read = self.read  # of this attempt
        self.end_headers()
        for number in range(5):
            if number:
                read.acquire()
            event = b"data: %d\n\n" % number
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Port", str(self.server.server_address[1]))
        self.send_header("X-Asked", " ".join(self.headers))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def replicas() -> Iterator[dict[str, str]]:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Replica) for _ in range(3)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    names = ("one", "two", "three")
    yield {name: f"http://127.0.0.1:{each.server_port}" for name, each in zip(names, servers, strict=True)}
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("proxy", [haproxy, caddy])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chats"])
def test_proxy_forwards_events_one_by_one(machine: Machine, replicas: dict[str, str], proxy: Any, path: str) -> None:
    headers = {"Host": "chat.example.com"}
    with proxy(machine, replicas) as url:
        machine.wait(lambda: machine.answers(f"{url}/health", headers))
        whole = "".join(f"data: {number}\n\n" for number in range(5))
        for _ in range(10):  # on a busy machine the proxy's health checks may fail for a moment
            _Replica.read = read = threading.Semaphore(0)
            with httpx.stream("POST", url + path, json={}, headers=headers, timeout=120) as answer:
                status, text = answer.status_code, ""
                for chunk in answer.iter_text():
                    text += chunk
                    read.release()
            if (status, text) == (200, whole):
                break
        assert (status, text) == (200, whole)


@pytest.mark.parametrize("proxy", [haproxy, caddy])
@pytest.mark.parametrize("name", ["X-Conversation-Id", "X-Api-Key", "Authorization", "none"])
def test_proxy_sends_requests_of_a_program_to_one_replica(
    machine: Machine, replicas: dict[str, str], proxy: Any, name: str
) -> None:
    values = ["none" if name == "none" else str(number) for number in range(24)]
    with proxy(machine, replicas) as url:
        machine.wait(lambda: machine.answers(f"{url}/health", {"Host": "chat.example.com"}))
        for _ in range(10):  # on a busy machine the proxy's health checks may fail for a moment
            ports = dict[str, set[str | None]]()
            for value in values * 3:
                headers = {"Host": "chat.example.com", name: value}
                answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=120)
                assert "x-affinity" not in answer.headers.get("X-Asked", "").lower()
                ports.setdefault(value, set()).add(answer.headers.get("X-Port"))
            found = {max(len(each) for each in ports.values()), len(set.union(*ports.values()))}
            if found == (expected := {1, 1 if name == "none" else 3}):
                break
        assert found == expected


@pytest.mark.parametrize("proxy", [haproxy, caddy])
def test_proxy_allows_slow_complete_response(
    machine: Machine, replicas: dict[str, str], proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all timeouts divided by 100, 0.8 s exceeds every timeout except the server's, which becomes 36 s."""
    monkeypatch.setattr(_Replica, "seconds", 0.8)
    headers = {"Host": "chat.example.com"}
    with proxy(machine, replicas, faster=100.0) if proxy is haproxy else proxy(machine, replicas) as url:
        machine.wait(lambda: machine.answers(f"{url}/health", headers))
        for path in ("/v1/whole", "/whole"):
            while (answer := httpx.post(url + path, json={}, headers=headers, timeout=120)).status_code == 503:
                pass
            assert (answer.status_code, answer.text) == (200, "whole")


@pytest.mark.skipif(os.environ.get("CHAOS") != "long", reason="takes two minutes for each proxy: make chaos")
@pytest.mark.parametrize("proxy", [haproxy, caddy])
def test_proxy_allows_two_minute_response(
    machine: Machine, replicas: dict[str, str], proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the timeouts as written in the file."""
    monkeypatch.setattr(_Replica, "seconds", 120.0)
    headers = {"Host": "chat.example.com"}
    with proxy(machine, replicas) as url:
        machine.wait(lambda: machine.answers(f"{url}/health", headers))
        answer = httpx.post(f"{url}/v1/whole", json={}, headers=headers, timeout=300)
        assert (answer.status_code, answer.text) == (200, "whole")
