"""What starts and stops replicas, and the limits that an operator gives."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from millrace.errors import InvalidState, Unavailable
from services.coordinator.scaling.autoscaler import limits
from services.coordinator.scaling.scalers import LocalScaler, scaler
from tests.deploy.expressions import OF_AUTOSCALING, lacking
from tests.services.coordinator.cluster import until
from tests.services.coordinator.conftest import running
from tests.telemetry.metrics.pages import value


def test_the_local_scaler_reads_what_runs(tmp_path: Path) -> None:
    state = {
        "complete": True,
        "replicas": 3,
        "processes": {"coordinator": 1, "trainer": 2, "rollout-0": 3, "rollout-1": 4},
    }
    (tmp_path / "stack.json").write_text(json.dumps(state))
    assert asyncio.run(LocalScaler(tmp_path).current()) == 2, "one of them was drained or died"
    (tmp_path / "stack.json").write_text(json.dumps(state | {"complete": False}))
    assert asyncio.run(LocalScaler(tmp_path).current()) == 3, "the supervisor still starts them"
    (tmp_path / "stack.json").unlink()
    with pytest.raises(Unavailable, match=r"stack\.json cannot be read"):
        asyncio.run(LocalScaler(tmp_path).current())


@pytest.mark.parametrize("text", ["3", "3:1", "0:0", "a:b", "1:2:3", "-1:3", "1:2000"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidState, match=r"--autoscale: .* is not MIN:MAX.*Fix"):
        limits(text, 0.0, 0.0)


def test_a_budget_needs_a_price() -> None:
    with pytest.raises(InvalidState, match="--replica-price"):
        limits("1:3", 0.0, 5.0)
    assert limits("1:8", 2.0, 5.0).most == 2


def test_an_unknown_scaler_is_refused() -> None:
    with pytest.raises(InvalidState, match="local, none"):
        scaler("nomad", "")
    with pytest.raises(InvalidState, match="belongs to no local stack"):
        scaler("local", "")


def test_a_coordinator_that_scales_shows_what_it_wants(empty_redis_url: str, tmp_path: Path) -> None:
    """With the scaler `none` somebody else reads the metrics and starts the replicas."""
    environment = {"REDIS_URL": empty_redis_url, "MILLRACE_AUTOSCALE": "2:3", "MILLRACE_SCALER": "none"}

    async def played(port: int) -> str:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

            async def page() -> str:
                return (await http.get("/metrics")).text

            return str(await until(page, lambda found: lacking(found, OF_AUTOSCALING) == [], within_s=120))

    with running(tmp_path / "state", environment=environment) as coordinator:
        found = asyncio.run(played(coordinator.http_port))
    assert value(found, 'millrace_replicas_wanted{pool="rollout"}') == 2
    assert value(found, 'millrace_replicas_ready{pool="rollout"}') == 0
    assert value(found, 'millrace_scalings_total{pool="rollout",reason="limits"}') == 1
