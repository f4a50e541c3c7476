import asyncio
from pathlib import Path

import pytest

from millrace.ids import MemberId
from millrace.local.host import device_name, visible_devices
from millrace.wire.channel import Peer
from services.rollout.replica import Replica
from services.rollout.work.leases import Leases


def test_devices_have_the_name_that_the_driver_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, bus in enumerate(("0000:19:00.0", "0000:3b:00.0")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t NVIDIA H200\nDevice Minor: \t {number}\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_devices() == ["0", "1"]
    assert device_name(tmp_path) == "NVIDIA H200" and device_name(tmp_path / "none") == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_name(tmp_path) == "cpu"


def test_a_replica_names_its_device_before_its_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tells it when the replica joins a job: `rollout-1 (vllm, cpu) joins`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def device() -> str:
        peer, member_id = Peer("127.0.0.1:9"), MemberId("rollout-1")
        return Replica(member_id, "vllm", "", Leases(peer, member_id)).registration("127.0.0.1:8").device

    assert asyncio.run(device()) == "cpu"
