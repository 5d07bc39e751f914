"""Plan a cluster, create its Ray Serve configuration (without secrets), autoscale it, and detect stuck engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from notso.smollm3 import EngineError, EngineStats, NotsoError
from notso.web.values.errors import SettingsError

APPLICATION, DEPLOYMENT = "notso", "replica"
NEEDS_SHARED_STORES = "several replicas require DATABASE_URL and VALKEY_URL in the environment of Ray on each machine"
# Seconds within which a stopping replica must finish its answers and the pages' event streams.
GRACE_SECONDS = 120.0
# Maximum number of open requests per replica, including the pages' event streams. The maximum is high, because the
# server itself limits the requests that wait for the engine.
OPEN_REQUESTS = 1000
# Environment variables with which Ray must be started on each machine.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "notso.cluster.front:proxy_layers",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Number, placement and settings of replicas. Raises SettingsError."""

    replicas: int = 1
    max_replicas: int = 0  # if larger than `replicas`, the number of replicas depends on the load
    per_machine: int = 1  # maximum number of replicas per machine
    cpus: float = 1.0  # CPUs that Ray reserves for each replica; a replica can use more
    requests_per_replica: float = 16.0  # target of autoscaling: number of requests per replica
    host: str = "127.0.0.1"
    port: int = 3000
    every_machine: bool = True  # whether every machine accepts requests, or only the head node
    release: str = ""  # any text; changing it replaces the replicas gradually, for example after an update
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of Settings, without secrets

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.per_machine < 1:
            raise SettingsError("at least one replica is required", setting="replicas")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise SettingsError("max_replicas must not be less than replicas", setting="max_replicas")
        check_settings(self.settings)

    @property
    def has_several(self) -> bool:
        return max(self.replicas, self.max_replicas) > 1


REPLICA_SETTINGS = frozenset({"data_dir", "api_key_file", "allowed_hosts", "trusted_proxies"})


def check_settings(names: Iterable[str]) -> None:
    """Raise SettingsError if replicas do not support one of the settings."""
    for name in names:
        if name not in REPLICA_SETTINGS:
            raise SettingsError(f"replicas have no setting {name!r}", setting=name)


def serve_config(plan: ClusterPlan) -> dict[str, Any]:
    deployment: dict[str, Any] = {
        "name": DEPLOYMENT,
        "max_replicas_per_node": plan.per_machine,
        "max_ongoing_requests": OPEN_REQUESTS,
        "max_queued_requests": OPEN_REQUESTS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": GRACE_SECONDS,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "rolling_update_percentage": 0.2,
        "ray_actor_options": {"num_cpus": plan.cpus},
        "request_router_config": {
            "request_router_class": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
            "request_router_kwargs": {"num_fallback_replicas": 1},
        },
    }
    if plan.max_replicas > plan.replicas:
        deployment["autoscaling_config"] = {
            "min_replicas": plan.replicas,
            "initial_replicas": plan.replicas,
            "max_replicas": plan.max_replicas,
            "upscale_delay_s": 30.0,
            "downscale_delay_s": 1800.0,  # long, because removing a replica discards its prompt cache
            "policy": {
                "policy_function": f"{__name__}:ByQueue",
                "policy_kwargs": {"requests_per_replica": plan.requests_per_replica},
            },
        }
    else:
        deployment["num_replicas"] = plan.replicas
    return {
        "proxy_location": "EveryNode" if plan.every_machine else "HeadOnly",
        "http_options": {"host": plan.host, "port": plan.port, "keep_alive_timeout_s": 90},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "notso.cluster.replica:build",
                "args": {
                    "release": plan.release,
                    "has_several": plan.has_several,
                    "per_machine": plan.per_machine,
                    "engine": dict(plan.engine),
                    "settings": {**plan.settings, "host": plan.host, "port": plan.port},
                },
                "deployments": [deployment],
            }
        ],
    }


class ClusterError(NotsoError):
    """Ray is not installed, is unreachable, or failed."""


def last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["no reason given"])[-1].rpartition("Error: ")[2]


# Name of the metric that counts running and waiting engine requests.
METRIC = "requests"


class AutoscalingContext(Protocol):
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    target_num_replicas: int


class ByQueue:
    # Serve's own policy would also count open pages, which do not use the engine.
    def __init__(self, requests_per_replica: float) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get(METRIC) or {}
        if not reported:  # no replica has reported yet, so keep the number of replicas
            return context.target_num_replicas, {}
        return max(1.0, sum(reported.values()) / self._requests_per_replica), {}


# A busy engine is considered stuck if it completes no step for this many seconds. On a slow machine, the longest step
# takes half a minute.
STUCK_SECONDS = 120.0


class ProgressMonitor:
    """Detects an engine that has work but makes no progress."""

    def __init__(self) -> None:
        self._steps, self._progress_time = -1, 0.0

    def record_progress(self, stats: EngineStats, now: float) -> None:
        """Record the engine's progress at time `now`. Raises EngineError if the engine is stuck."""
        if stats.steps_total != self._steps or not stats.running + stats.waiting:
            self._steps, self._progress_time = stats.steps_total, now
        elif now - self._progress_time > STUCK_SECONDS:
            raise EngineError(f"the engine has not completed a step for {now - self._progress_time:.0f} s")
