"""The planned cluster as a Ray Serve configuration (no secrets), and the cluster errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from notso.smollm3 import NotsoError
from notso.web.values.errors import SettingsError

APPLICATION, DEPLOYMENT = "notso", "replica"
NOTHING_BETWEEN = "several replicas need DATABASE_URL and VALKEY_URL in the environment of each machine's Ray"
GRACE_SECONDS = 120.0
"""So long may answers that run when a replica is told to leave go on; it waits for the streams of its pages, too."""
OPEN_REQUESTS = 1000
"""Of one replica, streams of open pages among them; how many questions wait is the server's own business."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "notso.cluster.affinity:proxy_layers",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""In which Ray is to be started on each machine."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """replicas: how many; up to max_replicas where that is larger, by what they have to do. per_machine: how many one
    machine may have. cpus: what Ray reserves for each; it binds nothing. requests_per_replica: answers at once, by
    which it is decided how many there are. host, port: where each machine listens. release: any text; another one
    replaces replicas one after another. engine: fields of EngineConfig. settings: fields of Settings, without secrets.

    Raises SettingsError.
    """

    replicas: int = 1
    max_replicas: int = 0
    per_machine: int = 1
    cpus: float = 1.0
    requests_per_replica: float = 16.0
    host: str = "127.0.0.1"
    port: int = 3000
    every_machine: bool = True
    release: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.per_machine < 1:
            raise SettingsError("there is at least one replica", setting="replicas")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise SettingsError("max_replicas must not be below replicas", setting="max_replicas")

    @property
    def has_several(self) -> bool:
        """Whether replicas need something between them."""
        return max(self.replicas, self.max_replicas) > 1


def serve_config(plan: ClusterPlan) -> dict[str, Any]:
    """The file that `serve run`, `serve deploy` and a RayService's serveConfigV2 take."""
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
            "downscale_delay_s": 1800.0,  # what goes takes its cache with it
            "policy": {
                "policy_function": "notso.cluster.replica:ByQueue",
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
    """Ray is not installed, cannot be reached, or could not do what it was told."""
