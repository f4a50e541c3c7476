"""The choice of what sends tokens to experts."""

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.descriptors import Hosts


@pytest.mark.parametrize(
    ("asked", "experts", "hosts", "chosen"),
    [
        ("auto", 8, Hosts(16, 8), "deepep"),
        ("auto", 16, Hosts(16, 8), "alltoall"),
        ("deepep", 16, Hosts(16, 8), "deepep"),
        ("alltoall", 8, Hosts(8, 8), "alltoall"),
        ("auto", 1, Hosts(8, 8), "alltoall"),
    ],
)
def test_auto_takes_deepep_within_a_host_only(
    asked: str, experts: int, hosts: Hosts, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.trainer.backends.megatron.model import configuration as dispatch  # imports Megatron

    monkeypatch.setattr(dispatch, "deepep_obstacle", lambda: None)
    options = MegatronOptions.model_validate({"expert_parallel": experts, "experts": {"dispatcher": asked}})
    assert dispatch.dispatcher(options, hosts) == chosen
