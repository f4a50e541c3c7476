"""The part of a replica that runs inside each of SGLang's scheduler processes, one a rank.

SGLang lets its caller name the function that these processes run. Ours runs theirs with two additions: a sampler that
reports the distribution really sampled from and marks every token with the version that made it, and an inlet for the
phases of a publication.
"""

import os
import queue
import time
from types import SimpleNamespace
from typing import Any

from services.rollout.engines.sglang.options import MARK
from services.rollout.engines.worker_engine import BETWEEN_BATCHES
from services.rollout.weights.in_worker import WeightReceiver
from services.rollout.weights.worker_rpc import SOCKET, Answer, Inlet, Request, carried_out, expired

PAUSED_LOOK_S = 0.0005
"""Between two looks of a paused scheduler at its requests. It would look without any rest, and the thread that receives
weights meanwhile would wait for the interpreter's lock at every step."""
NONE = -1


class Label:
    """The version that this process generates with, and under which name its keys and values are kept."""

    version = NONE
    cache_key = ""


LABEL = Label()


def run_scheduler_process(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **named: Any
) -> None:
    """Runs SGLang's scheduler for one rank until it ends."""
    from sglang.srt.layers import sampler
    from sglang.srt.managers import scheduler

    from services.rollout.lifeline import hold_on

    hold_on()
    sampler.register_sampler_backend("pytorch", _marking_sampler)
    theirs = scheduler.Scheduler

    class Scheduler(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._millrace_inlet = SchedulerInlet(self, tp_rank)

        def process_input_requests(self, requests: Any) -> Any:
            relabelled(requests)
            result = super().process_input_requests(requests)
            self._millrace_inlet.answer_due()
            return result

    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


def relabelled(requests: Any) -> None:
    """Requests that come in find nothing but what this version's have left, though their names for it are older: SGLang
    holds back what it gets while it is paused. All ranks get the same ones; what comes to one before its label and to
    another after it is relabelled there in the queue."""
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
            """Cuts `probs` in place, of which SGLang reports the logarithm. It has divided by the temperature."""
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
    """Receives into the model of one scheduler."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        runner = scheduler.tp_worker.model_runner
        self.rank = rank
        self.model_config = SimpleNamespace(dtype=runner.dtype)
        self.get_model = lambda: runner.model
        self._scheduler = scheduler

    def label(self, version: int, cache_key: str) -> Answer:
        """What is sampled from here on is of `version`. Requests that wait to be prefilled, some of them again, must
        find none of the old version's keys and values."""
        LABEL.version, LABEL.cache_key = version, cache_key
        for waiting in self._scheduler.waiting_queue:
            waiting.extra_key = cache_key
        return {}


class SchedulerInlet(Inlet):
    """Carries out in the scheduler's own thread, by `answer_due`, what has to lie between two batches."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        self._scheduler = scheduler
        self._receiver = SglangReceiver(scheduler, rank)
        self._due: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._held: Request | None = None
        super().__init__(os.environ[SOCKET], _introduction(scheduler, rank), self._taken)

    def _taken(self, request: Request) -> Answer | None:
        if not request["paused"] and request["method"] not in BETWEEN_BATCHES:
            return carried_out(self._receiver, request)
        self._due.put(request)
        return None

    def answer_due(self) -> None:
        if self._scheduler._engine_paused:
            time.sleep(PAUSED_LOOK_S)
        while self._held is not None or not self._due.empty():
            request = self._held if self._held is not None else self._due.get()
            self._held = None
            if expired(request):
                continue  # it was given up: carried out now it would meet another publication
            if request["paused"]:
                if not self._scheduler._engine_paused:
                    self._held = request  # the order to pause comes on a way of its own
                    return
                _settle()
            self.answer(request, carried_out(self._receiver, request))


def _introduction(scheduler: Any, rank: int) -> dict[str, Any]:
    import torch

    runner = scheduler.tp_worker.model_runner
    return {
        "rank": rank,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "requests": int(scheduler.max_running_requests),
        "tokens": int(scheduler.max_total_num_tokens),
    }


def _settle() -> None:
    """Waits for the batch that the device may still work on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
