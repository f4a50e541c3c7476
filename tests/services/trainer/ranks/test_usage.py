"""What ranks report of their hosts and GPUs, and what the trainer makes of it."""

import torch

from millrace.telemetry.usage import GpuReading
from services.trainer.ranks.heartbeats import Heartbeat, Usage, UsageMeter, usage_of_ranks


def test_a_rank_measures_itself_and_its_host() -> None:
    usage = UsageMeter(torch.device("cpu")).measure()
    assert 0 < usage.resident_bytes < usage.host_size_bytes and 0 < usage.host_used_bytes <= usage.host_size_bytes
    assert Heartbeat.decode(Heartbeat(3, False, usage).encode()) == Heartbeat(3, False, usage)


def test_ranks_of_one_host_are_one_host() -> None:
    def of(number: int) -> Usage:
        gpu = GpuReading(str(number), 4, 8, 0.5)
        return Usage(resident_bytes=10, host_used_bytes=50, host_size_bytes=100, gpu=gpu)

    usage = usage_of_ranks([("a", of(0)), ("a", of(1)), ("b", of(0)), ("c", Usage())])
    assert [(one.host, one.process_bytes, one.used_bytes) for one in usage.hosts] == [("a", 20, 50), ("b", 10, 50)]
    assert [(one.host, one.gpu, one.busy) for one in usage.gpus] == [("a", "0", 0.5), ("a", "1", 0.5), ("b", "0", 0.5)]
