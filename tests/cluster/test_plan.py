"""The configuration for Serve contains what was requested and no secrets."""

from __future__ import annotations

import json

import pytest

from notso.cluster.plan import ClusterPlan, serve_config
from notso.web.values.errors import SettingsError


def test_replicas_that_are_many_or_grow() -> None:
    [fixed] = serve_config(ClusterPlan(replicas=2))["applications"][0]["deployments"]
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    [growing] = serve_config(ClusterPlan(replicas=2, max_replicas=8))["applications"][0]["deployments"]
    assert "num_replicas" not in growing and growing["autoscaling_config"]["max_replicas"] == 8


def test_defaults_that_hurt_are_not_those_of_serve() -> None:
    """Serve's defaults are five requests at a time and twenty seconds for shutdown."""
    [deployment] = serve_config(ClusterPlan())["applications"][0]["deployments"]
    assert deployment["max_ongoing_requests"] >= 1000 and deployment["graceful_shutdown_timeout_s"] >= 120
    assert serve_config(ClusterPlan())["http_options"]["host"] == "127.0.0.1"


def test_another_release_is_another_configuration() -> None:
    one, two = (serve_config(ClusterPlan(release=each)) for each in ("1", "2"))
    assert one["applications"][0]["args"] != two["applications"][0]["args"]


def test_no_secret_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "VALKEY_URL", "NOTSO_API_KEY"):
        monkeypatch.setenv(name, "a very secret value")
    assert "secret" not in json.dumps(serve_config(ClusterPlan(replicas=3)))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_replicas"):
        ClusterPlan(replicas=4, max_replicas=2)
    with pytest.raises(SettingsError, match="at least one"):
        ClusterPlan(replicas=0)


def test_a_setting_that_replicas_do_not_read_is_refused() -> None:
    with pytest.raises(SettingsError, match="'drain_seconds'"):
        ClusterPlan(settings={"data_dir": None, "drain_seconds": 3})
