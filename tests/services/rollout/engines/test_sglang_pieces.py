"""Parts of the SGLang engine that run without SGLang: messages, calls into schedulers, refusals."""

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace import software
from millrace.engines import ENGINES
from millrace.engines.sglang import unequal
from millrace.errors import InvalidJob, PublicationFailed, Unavailable
from millrace.ids import Version
from services.rollout.engine import EngineStats, VersionSpan
from services.rollout.engines import probe
from services.rollout.engines.options import check_name
from services.rollout.engines.sglang import engine
from services.rollout.engines.sglang import options as sglang_options
from services.rollout.engines.sglang.engine import SchedulerStats
from services.rollout.engines.sglang.worker import LABEL, SchedulerRpc, relabel
from services.rollout.engines.sglang.worker_methods import SglangMethods
from services.rollout.nodes.place import EngineStart
from services.rollout.weights import worker_rpc
from services.rollout.weights.worker_messages import Reply, Request, carry_out, decode_reply, decode_request, encode
from services.rollout.weights.worker_methods import Described, Received, WorkerMethods
from services.rollout.weights.worker_rpc import SOCKET, WorkerDied, WorkerRpc
from tests.services.rollout.conftest import Run
from tests.services.rollout.jobs import job_spec


class Scheduler:
    """The part of a scheduler that a connection uses: a loop that looks at it between two batches."""

    def __init__(self) -> None:
        model = torch.nn.Linear(2, 2)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, dtype=torch.bfloat16))
        self.max_running_requests, self.max_total_num_tokens = 16, 4096
        self.waiting_queue = [SimpleNamespace(extra_key="3")]
        self.labelled: list[int] = []
        self._engine_paused = False
        self.held_up = threading.Event()
        self.ended = threading.Event()

    def run(self, rank: int) -> None:
        rpc = SchedulerRpc(self, rank)
        label = rpc.receiver.label
        rpc.receiver.label = lambda version, key: self.labelled.append(version) or label(version, key)  # type: ignore
        while not self.ended.is_set():
            if not self.held_up.is_set():
                rpc.carry_out_waiting()
            time.sleep(0.001)
        rpc.close()


@contextmanager
def ranks(count: int) -> Iterator[list[Scheduler]]:
    schedulers = [Scheduler() for _ in range(count)]
    threads = [threading.Thread(target=s.run, args=(rank,), daemon=True) for rank, s in enumerate(schedulers)]
    for thread in threads:
        thread.start()
    try:
        yield schedulers
    finally:
        for scheduler in schedulers:
            scheduler.ended.set()


@contextmanager
def met(run: Run, count: int = 2) -> Iterator[tuple[WorkerRpc, list[Scheduler]]]:
    workers = WorkerRpc("SGLang")
    os.environ[SOCKET] = run(workers.listen())
    with ranks(count) as schedulers:
        told = run(workers.wait_for_workers(count, 20.0))
        assert [(one.rank, one.dtype, one.max_requests) for one in told] == [(n, "bfloat16", 16) for n in range(count)]
        yield workers, schedulers
        run(workers.close())


def test_messages_carry_bytes_numbers_and_answers() -> None:
    request = Request(7, "x", [b"\x00\xff", "é", 3, None, {"deep": [b""]}], paused=True, deadline=1.5)
    assert decode_request(encode(request)) == request and request.expired
    received = Received(((1, 2**64 - 1), (2, 0)), wire_s=0.5, checksum_s=0.0)
    reply = decode_reply(encode(Reply(int(torch.tensor(7)), received)))
    assert reply.number == 7 and reply.result(WorkerMethods.wait_received) == received
    assert decode_reply(encode(Reply(8, None))).result(WorkerMethods.wait_received) is None
    described = Described(b"\x01", (3, 5))
    assert decode_reply(encode(Reply(9, described))).result(WorkerMethods.describe) == described


def test_a_worker_s_failure_is_the_same_error_at_the_replica() -> None:
    class Worker:
        def abort(self) -> None:
            raise InvalidJob("no place for it.", "take another engine.")

    reply = carry_out(Worker(), Request(1, "abort", [], paused=False, deadline=0.0))  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match=r"no place for it\. Fix: take another engine\."):
        decode_reply(encode(reply)).result(WorkerMethods.abort)


def test_every_rank_answers_in_its_order(run: Run) -> None:
    with met(run) as (workers, _):
        assert run(workers.ask(WorkerMethods.abort)) == [None, None]


def test_what_needs_a_pause_waits_for_it_and_labels_what_comes_after(run: Run) -> None:
    async def scenario(workers: WorkerRpc, schedulers: list[Scheduler]) -> None:
        labelling = asyncio.create_task(workers.ask(SglangMethods.label, 4, "4.1", paused=True))
        await asyncio.sleep(0.05)
        assert not labelling.done()
        for scheduler in schedulers:
            scheduler._engine_paused = True
        await asyncio.wait_for(labelling, 10)

    with met(run) as (workers, schedulers):
        run(scenario(workers, schedulers))
        assert LABEL.version == 4
        assert [waiting.extra_key for s in schedulers for waiting in s.waiting_queue] == ["4.1", "4.1"]
    late, warm_up = SimpleNamespace(extra_key="3.0"), SimpleNamespace(extra_key=None)
    relabel([SimpleNamespace(batch=[late]), warm_up, SimpleNamespace(rid="abort")])
    assert (late.extra_key, warm_up.extra_key) == ("4.1", None)


def test_what_was_given_up_does_not_meet_the_next_pause(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_rpc, "RPC_S", 0.2)
    with met(run, 1) as (workers, (scheduler,)):
        with pytest.raises(Unavailable, match="did not answer label within"):
            run(workers.ask(SglangMethods.label, 8, "8.1", paused=True))
        monkeypatch.setattr(worker_rpc, "RPC_S", 20.0)
        scheduler._engine_paused = True
        run(workers.ask(SglangMethods.label, 9, "9.1", paused=True))
        assert scheduler.labelled == [9]


def test_what_needs_no_pause_does_not_wait_for_the_batch(run: Run) -> None:
    with met(run) as (workers, schedulers):
        for scheduler in schedulers:
            scheduler.held_up.set()
        assert run(workers.ask(WorkerMethods.abort)) == [None, None]


def test_a_failure_names_the_call_and_the_next_call_works(run: Run) -> None:
    with met(run) as (workers, _):
        with pytest.raises(PublicationFailed, match="describe failed in the engine: DecodeError"):
            run(workers.ask(WorkerMethods.describe, b"no manifest"))
        assert run(workers.ask(WorkerMethods.abort)) == [None, None]


def test_a_late_answer_is_not_taken_for_the_next(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_rpc, "RPC_S", 0.2)
    with met(run, 1) as (workers, (scheduler,)):
        scheduler.held_up.set()
        with pytest.raises(Unavailable, match="did not answer place within"):
            run(workers.ask(WorkerMethods.place))
        scheduler.held_up.clear()
        monkeypatch.setattr(worker_rpc, "RPC_S", 20.0)
        with pytest.raises(PublicationFailed, match="the publication was aborted"):
            run(workers.ask(WorkerMethods.begin))


def test_a_scheduler_that_ends_is_a_dead_engine(run: Run) -> None:
    async def asked_until_it_is_gone(workers: WorkerRpc) -> None:
        async with asyncio.timeout(60):
            while True:
                await workers.ask(WorkerMethods.abort)

    with met(run, 1) as (workers, (scheduler,)):
        scheduler.ended.set()
        with pytest.raises(WorkerDied, match="a worker of SGLang ended during abort"):
            run(asked_until_it_is_gone(workers))


def test_a_rank_that_does_not_come_is_told(run: Run) -> None:
    async def alone() -> None:
        workers = WorkerRpc("SGLang")
        await workers.listen()
        try:
            await workers.wait_for_workers(2, 0.1)
        finally:
            await workers.close()

    with pytest.raises(Unavailable, match="0 of 2 workers of SGLang"):
        run(alone())


def test_marks_become_spans() -> None:
    assert engine._spans([3, 3, 4]) == (VersionSpan(Version(3), 0, 2), VersionSpan(Version(4), 2, 3))
    assert engine._spans([]) == ()


def test_what_will_not_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, "sglang")
    with pytest.raises(InvalidJob, match=r"rollout\.dtype: \"float32\": SGLang.*bfloat16"):
        sglang_options.server_arguments(spec)
    known = {"attention_backend", "max_running_requests"}
    check_name("sglang", "attention_backend", known, "ServerArgs")
    for option, fix in {
        "atention_backend": "did you mean `attention_backend`?",
        "dtype": r"set rollout\.dtype",
    }.items():
        with pytest.raises(InvalidJob, match=rf"rollout\.engine_options\.{option}.*{fix}"):
            check_name("sglang", option, known, "ServerArgs")
    quantized: Any = SimpleNamespace(quantization="fp8", model_path="here")
    with pytest.raises(InvalidJob, match="quantized weights"):
        sglang_options.check_model(quantized)


PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.75}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gemma", "hidden_act": "gelu"}, ""),
        ({"model_type": "gemma"}, "does not follow hidden_act = 'gelu_pytorch_tanh'"),
        ({"model_type": "exaone4", "rope_theta": 1000000}, ""),
        ({"model_type": "exaone4", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, ""),
        ({"model_type": "exaone4", "rope_parameters": {"rope_theta": 5e5}}, "rope_theta = 500000.0"),
        ({"model_type": "exaone4"}, "rope_theta = 10000.0"),
        ({"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual = True"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "takes norm_topk_prob = True"),
        ({"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 8}, "experts by groups"),
        ({"model_type": "deepseek_v3", "rms_norm_eps": 1e-5}, ""),
        ({"model_type": "deepseek_v3", "rms_norm_eps": 1e-4}, "SGLang norms latents with its rms_norm_eps of 0.0001"),
        ({"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2.0}}, "of the type linear"),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.5}}, ""),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.4}}, "a part of 0.5 .* of 0.4"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_parameters": PARTIAL}, ""),
        ({"model_type": "phi3", "rope_parameters": PARTIAL}, "a part of 1.0 .* of 0.75"),
        ({"model_type": "qwen3", "rope_scaling": YARN}, ""),
        ({"model_type": "qwen3", "rope_scaling": {**YARN, "attention_factor": 0.1 * math.log(4) + 1}}, ""),
        ({"model_type": "qwen3", "rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor = 1.0"),
        ({"model_type": "mistral", "sliding_window": 400}, ""),
        ({"model_type": "mistral", "sliding_window": 399}, "full attention, .* sliding_window of 399"),
        ({"model_type": "mistral", "sliding_window": None}, ""),
        ({"model_type": "cohere2", "sliding_window": 399}, "one token more than transformers', 400"),
        ({"model_type": "olmo3", "sliding_window": 9, "layer_types": ["full_attention"]}, ""),
        ({"model_type": "qwen3", "sliding_window": 9}, ""),
        ({"model_type": "qwen3_moe", "sliding_window": 9, "use_sliding_window": True}, "full attention"),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "num_hidden_layers": 28}, ""),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "num_hidden_layers": 29}, "full"),
    ],
)
def test_what_is_not_equal_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert bool(unequal(config, 400)) == bool(reason)
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = job_spec(tmp_path, "sglang", rollout={"dtype": "bfloat16"})  # texts of up to 400 tokens
    if reason:
        with pytest.raises(InvalidJob, match=f"model.path.*{reason}.*another engine"):
            sglang_options.server_arguments(spec)


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = ENGINES["sglang"].software
    assert sglang.release_warning("0.5.16") == sglang.release_warning("0.5.16.post1") == ""
    assert "SGLang 0.6.0 was not tried; 0.5.16 was" in sglang.release_warning("0.6.0")
    monkeypatch.setattr(software, "installed_release", lambda package: "")
    assert "'.[gpu-sglang]' in the checkout" in probe("sglang").why


def test_a_nodes_share_of_the_schedulers(tmp_path: Path) -> None:
    start = EngineStart(1, 2, "10.0.0.1", 25000, 7, "tcp://")
    spec = job_spec(tmp_path, "sglang", rollout={"engine_options": {"tp_size": 4}})
    assert sglang_options._node_arguments(spec, start) == {
        "nnodes": 2,
        "node_rank": 1,
        "dist_init_addr": "10.0.0.1:25000",
        "random_seed": 7,
    }
    odd = job_spec(tmp_path, "sglang", rollout={"engine_options": {"sglang": {"tp_size": 3}}})
    with pytest.raises(InvalidJob, match=r"engine_options\.sglang\.tp_size: 3: 3 schedulers do not divide"):
        sglang_options._node_arguments(odd, start)


def test_stats_are_those_of_the_newest_snapshots_and_of_the_answers() -> None:
    def snapshot(time_s: float, running: int, used: int, usage: float) -> SimpleNamespace:
        return SimpleNamespace(
            timestamp=time_s,
            num_running_reqs=running,
            num_waiting_reqs=2 * running,
            num_used_tokens=used,
            max_total_num_tokens=1_000_000,
            token_usage=usage,
        )

    snapshots = [snapshot(0.0, 0, 0, 0.0)]
    stats = SchedulerStats()
    assert stats.now is None
    stats.attach(SimpleNamespace(load_snapshot_reader=SimpleNamespace(read_all=lambda: snapshots)))
    assert stats.now is None, "the empty snapshot of a scheduler that has done nothing yet"
    stats.answered(30, {"cached_tokens": 16})
    stats.answered(10, {"cached_tokens": None})
    snapshots[:] = [snapshot(5.0, 3, 20, 0.0)]
    assert stats.now == EngineStats(3, 6, 2e-5, 40, 16)
    snapshots.append(snapshot(6.0, 1, 20, 0.25))  # a second copy, whose smaller cache is the fuller one
    assert stats.now == EngineStats(4, 8, 0.25, 40, 16)
    stats.attach(SimpleNamespace())
    assert stats.now is None, "a release without snapshots"


def test_stats_read_what_sglang_writes(tmp_path: Path) -> None:
    snapshots = pytest.importorskip("sglang.srt.managers.load_snapshot")
    path = str(tmp_path / "loads")
    stats = SchedulerStats()
    stats.attach(SimpleNamespace(load_snapshot_reader=snapshots.ShmLoadSnapshotReader(path, 1)))
    assert stats.now is None
    writer = snapshots.ShmLoadSnapshotWriter(path, 1, 0)
    assert stats.now is None
    told = {"num_running_reqs": 5, "num_waiting_reqs": 2, "num_used_tokens": 300, "max_total_num_tokens": 1200}
    writer.write(snapshots.LoadSnapshot(timestamp=1.0, token_usage=0.25, **told))
    assert stats.now == EngineStats(5, 2, 0.25, 0, 0)
    writer.write(snapshots.LoadSnapshot(timestamp=2.0, max_total_num_tokens=1200))
    assert stats.now == EngineStats(0, 0, 0.0, 0, 0)
    writer.close()
