"""The configuration for Serve contains what was requested and no secrets."""

from __future__ import annotations

import json
from pkgutil import resolve_name

import pytest

from notso.cluster.plan import ByQueue, ClusterPlan, serve_config
from notso.web.values.errors import SettingsError


def test_replica_count_is_fixed_or_autoscaled() -> None:
    [fixed] = serve_config(ClusterPlan(replicas=2))["applications"][0]["deployments"]
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    [growing] = serve_config(ClusterPlan(replicas=2, max_replicas=8))["applications"][0]["deployments"]
    scaling = growing["autoscaling_config"]
    assert "num_replicas" not in growing and scaling["max_replicas"] == 8
    policy = resolve_name(scaling["policy"]["policy_function"])
    assert isinstance(policy(**scaling["policy"]["policy_kwargs"]), ByQueue)


def test_unsuitable_serve_defaults_are_overridden() -> None:
    """Serve's defaults are five requests at a time and twenty seconds for shutdown."""
    [deployment] = serve_config(ClusterPlan())["applications"][0]["deployments"]
    assert deployment["max_ongoing_requests"] >= 1000 and deployment["graceful_shutdown_timeout_s"] >= 120
    assert serve_config(ClusterPlan())["http_options"]["host"] == "127.0.0.1"


def test_release_changes_the_configuration() -> None:
    one, two = (serve_config(ClusterPlan(release=each)) for each in ("1", "2"))
    assert one["applications"][0]["args"] != two["applications"][0]["args"]


def test_configuration_contains_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "VALKEY_URL", "NOTSO_API_KEY"):
        monkeypatch.setenv(name, "a very secret value")
    assert "secret" not in json.dumps(serve_config(ClusterPlan(replicas=3)))


def test_invalid_replica_counts_are_refused() -> None:
    with pytest.raises(SettingsError, match="max_replicas"):
        ClusterPlan(replicas=4, max_replicas=2)
    with pytest.raises(SettingsError, match="at least one"):
        ClusterPlan(replicas=0)


def test_settings_not_used_by_replicas_are_refused() -> None:
    with pytest.raises(SettingsError, match="'drain_seconds'"):
        ClusterPlan(settings={"data_dir": None, "drain_seconds": 3})
