"""What a member reports of its host: measured here, and put together from readings of several processes."""

import math
import os
import subprocess
import sys

import psutil

from millrace.contracts.field_rules import MOST_GPUS, check
from millrace.contracts.v1 import fleet_pb2
from millrace.telemetry.usage import GpuReading, HostMemory, UsageMonitor, process_tree_bytes, usage_message

HOLDS = "held = bytearray(64 << 20); held[::4096] = b'x' * len(held[::4096]); print('held', flush=True); input()"


def test_memory_of_child_processes_counts() -> None:
    before = process_tree_bytes()
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        grown = process_tree_bytes() - before
        child.communicate("\n")
    assert grown > 50 << 20


def test_a_monitor_reports_its_own_host() -> None:
    monitor = UsageMonitor("a", every_s=0.01)
    assert not monitor.message().hosts
    monitor.start()
    assert monitor.measured.wait(60)
    monitor.stop()
    (host,) = monitor.message().hosts
    assert host.host == "a" and host.size_bytes == psutil.virtual_memory().total
    assert psutil.Process(os.getpid()).memory_info().rss // 2 < host.process_bytes
    assert 0 < host.used_bytes <= host.size_bytes


def test_readings_of_the_same_host_and_gpu_are_put_together() -> None:
    memory = [("a", HostMemory(5, 50, 100)), ("b", HostMemory(7, 20, 100)), ("a", HostMemory(6, 51, 100))]
    gpus = [("a", GpuReading("0", 1, 9)), ("a", GpuReading("0", 2, 9, 0.5)), ("b", GpuReading("0", 3, 9))]
    usage = usage_message(memory, gpus)
    assert [(one.host, one.process_bytes, one.used_bytes) for one in usage.hosts] == [("a", 11, 51), ("b", 7, 20)]
    assert [(one.host, one.used_bytes, one.HasField("busy")) for one in usage.gpus] == [("a", 2, True), ("b", 3, False)]
    assert not usage.HasField("cache_used")


def test_a_heartbeat_with_any_usage_is_taken() -> None:
    many = [("a", GpuReading(str(number), 1, 2)) for number in range(MOST_GPUS + 5)]
    for cache, shown in ((0.0, 0.0), (1.5, 1.0), (-0.1, 0.0), (math.nan, None), (None, None)):
        usage = usage_message([], many, cache)
        check(fleet_pb2.HeartbeatRequest(member_id="rollout-1", usage=usage))
        assert (usage.cache_used if usage.HasField("cache_used") else None) == shown
    assert len(usage.gpus) == MOST_GPUS
