"""The part of a replica that runs inside each of SGLang's scheduler processes, one a rank.

SGLang lets its caller name the function that these processes run. Ours runs theirs with two additions: a sampler that
reports the distribution really sampled from and marks every token with the version that made it, and an inlet for the
phases of a publication, answered in the scheduler's own thread between two batches.
"""

import os
import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

from services.rollout.engines.sglang_wire import HEADER, MARK, SOCKET, decode, encode
from services.rollout.engines.weight_receiver import Answer, WeightReceiver

NONE = -1


class Label:
    """The version that this process generates with."""

    version = NONE


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
            self._millrace_inlet = Inlet(self, tp_rank)

        def process_input_requests(self, requests: Any) -> Any:
            result = super().process_input_requests(requests)
            self._millrace_inlet.answer_due()
            return result

    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


def _marking_sampler() -> Any:
    import torch
    from sglang.srt.layers import sampler

    from services.rollout.engines.distribution import processed_logprobs

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


class Inlet:
    """Takes requests of the replica in a thread; `answer_due` carries them out in the scheduler's."""

    def __init__(self, scheduler: Any, rank: int) -> None:
        self._scheduler = scheduler
        self._receiver = SglangReceiver(scheduler, rank)
        self._due: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._held: dict[str, Any] | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET])
        self._socket.sendall(encode(_introduction(scheduler, rank)))
        threading.Thread(target=self._listen, name="millrace inlet", daemon=True).start()

    def answer_due(self) -> None:
        while self._held is not None or not self._due.empty():
            request = self._held if self._held is not None else self._due.get()
            self._held = None
            if request.get("paused") and not self._scheduler._engine_paused:
                self._held = request  # the order to pause comes on a way of its own
                return
            self._socket.sendall(encode({**self._answer(request), "number": request["number"]}))

    def _answer(self, request: dict[str, Any]) -> Answer:
        try:
            if request["method"] == "label":
                return self._label(**request["arguments"])
            if request.get("paused"):
                _settle()
            method = getattr(self._receiver, request["method"])
            answer: Answer = method(*request["arguments"])
            return answer
        except Exception as error:  # whatever it is, the replica has to hear of it
            return {"failed": f"{request['method']} failed in SGLang: {type(error).__name__}: {error}", "mend": ""}

    def _label(self, version: int, recompute: bool) -> Answer:
        """What is sampled from here on is of `version`. Requests that wait to be prefilled again must find none of the
        old version's keys and values."""
        LABEL.version = version
        if recompute:
            for waiting in self._scheduler.waiting_queue:
                waiting.extra_key = str(version)
        return {}

    def _listen(self) -> None:
        stream = self._socket.makefile("rb")
        while header := stream.read(HEADER.size):
            self._due.put(decode(stream.read(HEADER.unpack(header)[0])))


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
