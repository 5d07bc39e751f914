"""Deployment files agree with the program: sandboxing and options of the service, settings, package contents."""

from __future__ import annotations

import http.client
import http.server
import json
import math
import os
import plistlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import deb
import pytest
import typer
import yaml
from emulation import DEBIAN_NAMES
from target import ROOT, version
from try_deb import of_unit
from try_image import settings
from web.test_front_end import NOT_INSTALLED

from notso.cli.app import app
from notso.cli.config_file import read_config
from notso.web.edge.connections import MAX_CONNECTIONS, RESERVED_DESCRIPTORS

UNIT = ROOT / "deploy" / "notso.service"
MOST_EXPOSURE = 20  # maximum of systemd-analyze security, in tenths
GROUP: Any = typer.main.get_command(app)


def test_systemd_service_exposure_is_within_limit() -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSURE}", UNIT]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-300:] + said.stderr


def test_systemd_service_runs_an_existing_command() -> None:
    command, variables, folders = of_unit(UNIT.read_text())
    assert command[:2] == ["/usr/bin/notso", "serve"]
    known = {name for each in GROUP.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    assert set(command[2:]) <= known
    kept = [variables[name] for name in ("NOTSO_DATA_DIR", "HF_HOME", "XDG_CACHE_HOME")]
    assert all(any(path.startswith(folder) for folder in folders) for path in kept)


def test_launchd_agent_runs_an_existing_command() -> None:
    agent = plistlib.loads((ROOT / "deploy" / "notso.plist").read_bytes())
    shell, option, script = agent["ProgramArguments"]
    assert (shell, option) == ("/bin/sh", "-c") and subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    command, _, rest = script.partition(" serve ")
    assert command == 'exec "$HOME/.local/bin/notso"'  # installed there by make link and by pip install --user
    known = {name for each in GROUP.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    assert set(rest.partition(" 2>>")[0].split()) <= known
    assert agent["KeepAlive"] == {"SuccessfulExit": False} and agent["Umask"] == 0o077
    assert agent["SoftResourceLimits"]["NumberOfFiles"] >= MAX_CONNECTIONS + RESERVED_DESCRIPTORS


def test_build_on_windows_fails_with_one_sentence(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    command = [cmake, "-S", ROOT, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Windows"]
    said = subprocess.run(command, capture_output=True, text=True)
    (sentence,) = [line.strip() for line in said.stderr.splitlines() if line.startswith("  ")]
    assert said.returncode == 1 and sentence.startswith("notso does not build on Windows: use WSL2")


def test_homebrew_formula_is_not_restricted_to_one_system() -> None:
    assert "depends_on :" not in (ROOT / "deploy" / "notso.rb").read_text()


def test_settings_in_the_sample_config_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (ROOT / "deploy" / "config.toml").read_text()
    used = tmp_path / "config.toml"
    monkeypatch.setenv("NOTSO_CONFIG", str(used))
    used.write_text(shown)
    assert read_config(GROUP) == {"serve": {}}
    used.write_text(re.sub(r"^# (?=[a-z-]+ = )", "", shown, flags=re.MULTILINE))
    assert {"model", "port", "host", "api_key_file", "allow_host"} == set(read_config(GROUP)["serve"])


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_debian_package_is_reproducible_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_packages(house: Path, python: str, machine: str) -> None:
        deb.put(house / "pyvenv.cfg", python)

    monkeypatch.setattr(deb, "environment", no_packages)
    monkeypatch.setattr(deb, "STAGES", tmp_path / "stages")
    made = deb.build("trixie", tmp_path)
    again = deb.build("trixie", tmp_path / "again")
    assert made.read_bytes() == again.read_bytes()
    listed = subprocess.run(["dpkg-deb", "--contents", made], capture_output=True, text=True, check=True).stdout
    rows = {line.split()[5]: line.split()[:2] for line in listed.splitlines()}
    assert all(owner == "root/root" for _, owner in rows.values())
    assert rows["./usr/bin/notso"][0] == "-rwxr-xr-x" and rows["./etc/notso/config.toml"][0] == "-rw-r--r--"
    assert "./usr/lib/systemd/system/notso.service" in rows and "./usr/lib/notso/pyvenv.cfg" in rows
    control = subprocess.run(["dpkg-deb", "--field", made], capture_output=True, text=True, check=True).stdout
    assert f"Version: {version()}-1~trixie\n" in control and "python3 (>= 3.13), python3 (<< 3.14)" in control
    for name in deb.SCRIPTS:
        (script,) = (tmp_path / "stages").glob(f"trixie-*/DEBIAN/{name}")
        subprocess.run(["sh", "-n", script], check=True)
    for machine, architecture in DEBIAN_NAMES.items():
        made = deb.build("trixie", tmp_path, machine)
        control = subprocess.run(["dpkg-deb", "--field", made], capture_output=True, text=True, check=True).stdout
        assert made.name.endswith(f"_{architecture}.deb") and f"Architecture: {architecture}\n" in control


def test_image_runs_existing_commands_and_stores_data_in_volumes() -> None:
    said = settings((ROOT / "deploy" / "Containerfile").read_text())
    command = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"])]
    check = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["notso", "serve"] and check[:2] == ["notso", "doctor"]
    for words in (command, check):
        known = {name for each in GROUP.commands[words[1]].params for name in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known
    assert int(said["USER"].partition(":")[0]) > 0
    kept = dict(each.split("=") for each in said["ENV"].split())
    folders = [kept[name] for name in ("HOME", "NOTSO_DATA_DIR", "HF_HOME", "XDG_CACHE_HOME")]
    assert {path.split("/")[1] for path in folders} == {each.strip("/") for each in said["VOLUME"].split()}


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.replica"])
def test_containerfile_names_no_architecture(name: str) -> None:
    lines = [line for line in (ROOT / "deploy" / name).read_text().splitlines() if not line.startswith("#")]
    named = [*DEBIAN_NAMES, *DEBIAN_NAMES.values()]
    assert lines and not [line for line in lines if any(each in line for each in named)]


def test_compose_file_matches_the_image() -> None:
    said = settings((ROOT / "deploy" / "Containerfile").read_text())
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["notso"]
    assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert [each.partition(":")[2] for each in service["volumes"]] == said["VOLUME"].split()
    assert [each.split(":")[-1] for each in service["ports"]] == [said["EXPOSE"]]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["environment"]["NOTSO_FETCH"] == "1", "the first start downloads the model"
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])


def test_front_end_packages_exclude_compute_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "deploy" / "front-packages.txt").read_text().splitlines()
    given = {line for line in lines if not line.startswith("#")}
    all_of_it, shared = (
        {re.split(r"[<>=]", line)[0] for line in each}
        for each in (project["dependencies"], [*extras["postgres"], *extras["valkey"]])
    )
    computing = {"numpy", "tokenizers", "llguidance", "huggingface_hub", "httpx2", "prompt_toolkit"}
    assert computing <= set(NOT_INSTALLED), "tests/web/test_front_end.py must run without them"
    assert given == (all_of_it - computing) | shared
    said = settings((ROOT / "deploy" / "Containerfile.front").read_text())
    assert json.loads(said["ENTRYPOINT"]) == ["python3", "-m", "notso"] and json.loads(said["CMD"])[0] == "serve"
    known = {name for each in GROUP.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    assert set(json.loads(said["CMD"])[1:]) <= known
    variables = dict(each.split("=") for each in said["ENV"].split())
    assert f"--target /payload{variables['PYTHONPATH']} " in (ROOT / "deploy" / "Containerfile.front").read_text()
    assert variables["NOTSO_DATA_DIR"] == said["VOLUME"]


def test_cluster_files_run_existing_commands() -> None:
    known = {name for each in GROUP.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    services = yaml.safe_load((ROOT / "deploy" / "compose.cluster.yaml").read_text())["services"]
    kubernetes = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    pod = kubernetes[0]["spec"]["template"]["spec"]["containers"][0]
    for command in (*(services[name]["command"] for name in ("one", "two", "three")), pod["args"]):
        assert command[0] == "serve" and {word for word in command if word.startswith("--")} <= known
    kinds = {(each["kind"], each["metadata"]["name"]) for each in kubernetes}
    assert {("Deployment", "notso"), ("PodDisruptionBudget", "notso"), ("Service", "notso-valkey")} <= kinds
    checks = {name: pod[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    paths = {name: check["path"] for name, check in checks.items()}
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/health"}
    assert all(each["httpHeaders"] == [{"name": "Host", "value": "localhost"}] for each in checks.values()), "or 421"


def test_replicas_serve_the_downloaded_model() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.cluster.yaml").read_text())["services"]
    for each in (services[name] for name in ("one", "two", "three")):
        assert each["depends_on"]["model"] == {"condition": "service_completed_successfully"}
        assert services["model"]["command"][:2] == ["pull", each["environment"]["NOTSO_MODEL"]]
        assert each["volumes"][-1:] == services["model"]["volumes"]
    (deployment, *_) = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]
    assert init["args"][:2] == ["pull", *(each["value"] for each in container["env"] if each["name"] == "NOTSO_MODEL")]
    assert [each for each in init["volumeMounts"] if each["name"] == "models"] == [
        each for each in container["volumeMounts"] if each["name"] == "models"
    ]


@pytest.mark.parametrize("proxy", ["haproxy", "caddy"])
def test_proxy_configuration_is_valid(proxy: str) -> None:
    program = shutil.which(proxy) or shutil.which(proxy, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{proxy} is not installed (Debian: apt-get install {proxy})")
    file = ROOT / "deploy" / {"haproxy": "haproxy.cfg", "caddy": "Caddyfile"}[proxy]
    command = {"haproxy": ["-c", "-f", file], "caddy": ["adapt", "--adapter", "caddyfile", "--config", file]}[proxy]
    said = subprocess.run([program, *command], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout[-500:] + said.stderr[-500:]


class _Deserter(http.server.BaseHTTPRequestHandler):
    """Replica that closes the connection on every request except health checks."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._leave()

    def do_POST(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/chats", "/v1/messages"])
def test_post_that_failed_on_one_replica_is_not_retried(path: str, tmp_path: Path) -> None:
    """The proxy may retry a GET request, because it has no side effects."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")
    replicas = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Deserter) for _ in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (ROOT / "deploy" / "haproxy.cfg").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for number, replica in enumerate(replicas, start=1):
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        text = text.replace(f"127.0.0.1:300{number}", f"127.0.0.1:{replica.server_port}")
    file = tmp_path / "haproxy.cfg"
    file.write_text(text)
    proxy = subprocess.Popen([program, "-db", "-f", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while proxy.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                os.sched_yield()
        _Deserter.asked.clear()
        for method in ("POST", "GET"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(method, path, headers={"Host": "localhost"})
            assert connection.getresponse().status == 502
            connection.close()
        assert _Deserter.asked.count(f"POST {path}") == 1
        assert (_Deserter.asked.count(f"GET {path}") > 1) == (path == "/chats")
    finally:
        proxy.terminate()
        proxy.wait()
        for replica in replicas:
            replica.shutdown()
            replica.server_close()


def test_dashboard_shows_only_documented_metrics() -> None:
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(notso_\w+)", target["expr"])
    }
    told = set(re.findall(r"^\| `(notso_\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    assert len(shown) > 10 and {name.removesuffix("_bucket") for name in shown} <= told


def test_monthly_costs_in_scaling_document_add_up() -> None:
    """The table in docs/scaling.md agrees with the formula in the same document."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8").partition("## What it costs a month")[2]
    row = r"^\| ([\d,]+)[^|]*\| (\d+) % \| (\d+)(?: \+ (\d+))? \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == 8
    for row in rows:
        people, share, engines, spare, hours, others, cost = (int(each.replace(",", "") or 0) for each in row)
        assert engines == math.ceil(people * share / 100 / 12), row
        assert spare == (max(1, math.ceil(engines / 20)) if people > 5 else 0), row
        assert hours == 730 * (engines + spare), row
        assert others == 730 * (0 if people <= 5 else 1 if people <= 30 else 5), row
        assert cost == int(hours * 0.10 + others * 0.05 + 0.5), row


def test_proxies_allow_long_responses_and_do_not_delay_streams() -> None:
    """A response without streaming sends nothing for minutes, which must not exceed a proxy's timeout."""
    haproxy, kubernetes = ((ROOT / "deploy" / name).read_text() for name in ("haproxy.cfg", "kubernetes.yaml"))
    assert "timeout server 1h" in haproxy and "option http-no-delay" in haproxy
    assert 'proxy-read-timeout: "3600"' in kubernetes and "enableServiceLinks: false" in kubernetes
