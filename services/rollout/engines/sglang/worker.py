"""The part of a replica that runs inside each of SGLang's scheduler processes, one for each rank.

SGLang lets its caller name the function that these processes run. `run_scheduler_process` runs SGLang's own with two
additions: a sampler that reports the distribution that was really sampled from and marks every token with the version
that sampled it, and a connection to the replica for the phases of a publication.
"""

import os
import queue
import time
from typing import Any

from services.rollout.engines.adapter import AdapterShape
from services.rollout.engines.sglang.adapter import AdapterSlot
from services.rollout.engines.sglang.options import MARK
from services.rollout.engines.sglang.worker_methods import SGLANG_BETWEEN_BATCHES
from services.rollout.weights.in_worker.model import EngineModel, without_adapters
from services.rollout.weights.in_worker.receiver import WeightReceiver
from services.rollout.weights.worker_messages import Introduction, Reply, Request, carry_out
from services.rollout.weights.worker_rpc import SOCKET, WorkerRpcServer

PAUSED_LOOK_S = 0.0005
"""Time between two looks of a paused scheduler at its requests. Otherwise it would look all the time, and the thread
that receives weights meanwhile would wait for the interpreter's lock at every step."""
NO_VERSION = -1
METHODS_BETWEEN_BATCHES = frozenset(method.__name__ for method in SGLANG_BETWEEN_BATCHES)


class Label:
    """The version that this process generates with, and the name of its keys and values in the cache."""

    version = NO_VERSION
    cache_key = ""


LABEL = Label()


def run_scheduler_process(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **named: Any
) -> None:
    """Runs SGLang's scheduler for one rank until it ends."""
    from sglang.srt.layers import sampler
    from sglang.srt.managers import scheduler

    from services.rollout.engines.lifeline import hold_on

    hold_on()
    sampler.register_sampler_backend("pytorch", _marking_sampler)
    base = scheduler.Scheduler

    class Scheduler(base):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._millrace_rpc = SchedulerRpc(self, tp_rank)

        def process_input_requests(self, requests: Any) -> Any:
            relabel(requests)
            result = super().process_input_requests(requests)
            self._millrace_rpc.carry_out_waiting()
            return result

    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


def relabel(requests: Any) -> None:
    """Gives requests that come in the cache key of the version in place. Theirs may be older: SGLang holds back what it
    gets while it is paused. All ranks get the same requests; one that came to a rank before `label` is relabelled in
    the queue by `label`."""
    for request in requests:
        for one in getattr(request, "batch", None) or (request,):
            if LABEL.cache_key and getattr(one, "extra_key", None):
                one.extra_key = LABEL.cache_key


def _marking_sampler() -> Any:
    import torch
    from sglang.srt.layers import sampler

    from services.rollout.engines.transformers.distribution import processed_logprobs

    class MarkingSampler(sampler.Sampler):  # type: ignore[misc]
        def forward(self, logits_output: Any, sampling_info: Any, *arguments: Any, **options: Any) -> Any:
            tokens = super().forward(logits_output, sampling_info, *arguments, **options)
            logits_output.customized_info = {MARK: [LABEL.version] * len(tokens)}
            return tokens

        def _sample_from_probs(self, probs: Any, sampling_info: Any, positions: Any, simple_sampling_case: bool) -> Any:
            """Applies top-k and top-p to `probs` in place, because SGLang reports its logarithm. It has applied the
            temperature."""
            if simple_sampling_case:
                return sampler.sampling_from_probs_torch(
                    probs, sampling_seed=sampling_info.sampling_seed, positions=positions
                )
            greedy = sampling_info.top_ks.view(-1) == 1
            top_k = sampling_info.top_ks.view(-1).clamp(max=probs.shape[-1])
            temperature = torch.where(greedy, 0.0, torch.ones_like(probs[:, 0]))
            cut = processed_logprobs(probs.log(), temperature, top_k, sampling_info.top_ps.view(-1)).exp()
            probs.copy_(cut)
            drawn = sampler.sampling_from_probs_torch(
                probs, sampling_seed=sampling_info.sampling_seed, positions=positions
            )
            return torch.where(greedy, probs.argmax(-1).to(drawn.dtype), drawn)

    return MarkingSampler()


class SglangReceiver(WeightReceiver):
    """Receives into the model of one scheduler. Implements `SglangMethods`."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._engine_model = EngineModel(rank, self._base, self._runner.dtype)
        super().__init__(self._engine_model)

    def _base(self) -> Any:
        """The model without the adapter."""
        if self._engine_model.adapter is None:
            return self._runner.model
        from sglang.srt.lora.layers import BaseLayerWithLoRA

        return without_adapters(self._runner.model, BaseLayerWithLoRA)

    def add_adapter(self, shape: str) -> list[str]:
        slot = AdapterSlot(self._runner.lora_manager, AdapterShape.decode(shape), self._runner.dtype)
        self._engine_model.adapter = slot
        return slot.unplaced

    def label(self, version: int, cache_key: str) -> None:
        LABEL.version, LABEL.cache_key = version, cache_key
        for waiting in self._scheduler.waiting_queue:
            # SGLang adds the adapter's id to the key of every request.
            waiting.extra_key = cache_key + (getattr(waiting, "lora_id", None) or "")


class SchedulerRpc:
    """Connects a scheduler to the replica. What has to run between two batches waits for `carry_out_waiting`, which the
    scheduler's own thread calls."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        self.receiver = SglangReceiver(scheduler, rank)
        self._scheduler = scheduler
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._before_pause: Request | None = None
        """Taken from the queue; it waits for generation to pause."""
        self._server = WorkerRpcServer(os.environ[SOCKET], _introduction(scheduler, rank), self._receive)

    def close(self) -> None:
        self._server.close()

    def _receive(self, request: Request) -> Reply | None:
        if not request.paused and request.method not in METHODS_BETWEEN_BATCHES:
            return carry_out(self.receiver, request)
        self._waiting.put(request)
        return None

    def carry_out_waiting(self) -> None:
        """Carries out the requests that may run now. Called between two batches."""
        if self._scheduler._engine_paused:
            time.sleep(PAUSED_LOOK_S)
        while self._before_pause is not None or not self._waiting.empty():
            request = self._before_pause if self._before_pause is not None else self._waiting.get()
            self._before_pause = None
            if request.expired:
                continue  # the replica waits no more: carried out now, it would meet another publication
            if request.paused:
                if not self._scheduler._engine_paused:
                    self._before_pause = request  # SGLang delivers the order to pause on a way of its own
                    return
                _finish_batch()
            self._server.reply(carry_out(self.receiver, request))


def _introduction(scheduler: Any, rank: int) -> Introduction:
    import torch

    runner = scheduler.tp_worker.model_runner
    return Introduction(
        rank,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        max_requests=int(scheduler.max_running_requests),
        cache_tokens=int(scheduler.max_total_num_tokens),
    )


def _finish_batch() -> None:
    """Waits for the batch that the device may still work on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
