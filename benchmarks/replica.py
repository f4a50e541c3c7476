"""How many tokens a second go through a replica, beside the same engine called directly in the same run.

    python -m benchmarks.replica --prompts 64 --samples 8 --tokens 128 --rounds 5

One engine, three ways in turn: through the replica (leases over gRPC from a coordinator in a process of its own, chat
template, scoring, packed answers), the same without recording spans, and straight through vLLM's AsyncLLM or SGLang's
tokenizer manager (the same prompts already tokenised, n samples a request). SGLang's direct rounds mark versions too,
as its replica's do. Everything shares this machine's cores. `--no-direct` leaves the last way out, for many rounds of
the first two: what spans cost. Prints one JSON object; the quartiles are those of the ratios of neighbouring rounds.
`spans` has the same another way, where rounds scatter by more than that: the spans of the rounds, times the processor
time of one, measured in the same run.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.spans import recording
from millrace.demo.model import random_model
from millrace.demo.tokenizer import byte_tokenizer
from millrace.ids import new_member_id
from millrace.spec import JobSpec, parse
from millrace.telemetry import logs
from millrace.telemetry.spans.recorder import RECORDER, Span
from millrace.wire.channel import Peer
from millrace.wire.server import Server
from services.rollout.replica import Replica
from services.rollout.server import servicers
from services.rollout.work.leases import Leases
from tests.sender import export
from tests.services.rollout.coordinator import Coordinator, configure, publish, until

WITHOUT_SPANS = "replica without spans"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; otherwise the demo's model, random")
    parser.add_argument("--engine", choices=DIRECT, default="vllm")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as JSON, beside --running")
    parser.add_argument("--prompts", type=int, default=64, help="in a round")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, default=64, help="samples in the engine at once ")
    parser.add_argument("--no-direct", action="store_true", help="only through the replica, with and without spans")
    options = parser.parse_args()
    logs.configure("bench")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        model = options.model or made_model(Path(folder))
        print(json.dumps(asyncio.run(measure(model, options)), indent=2))


def made_model(folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def job(model: Path, options: argparse.Namespace) -> JobSpec:
    return parse(
        {
            "name": "bench",
            "output": str(model / "output"),
            "model": {"path": str(model)},
            "data": {"files": ["rows.jsonl"], "max_prompt_tokens": 96},
            "reward": {"function": "exact", "workers": 1},
            "rollout": {
                "dtype": options.dtype,
                "samples_per_prompt": options.samples,
                "max_response_tokens": options.tokens,
                "engine_options": {RUNNING[options.engine]: options.running} | options.engine_options,
            },
            "trainer": {"token_budget": 96 + options.tokens},
        }
    )


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}: what comes after {number * 7919}?"}]


def coordinate(control: Connection, samples: int, tokens: int) -> None:
    """The coordinator's process: for each number received, issues so many prompts and says when all are answered."""

    async def serve() -> None:
        coordinator = Coordinator()
        control.send(await coordinator.start())
        while True:
            count = await asyncio.to_thread(control.recv)
            coordinator.groups.clear()
            for number in range(count):
                prompt = question(number)
                coordinator.issue(number, prompt, samples=samples, max_response_tokens=tokens)
            await until(lambda expected=count: coordinator.answered == expected, 600)
            control.send(coordinator.dropped)

    asyncio.run(serve())


async def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=coordinate, args=(theirs, options.samples, options.tokens), daemon=True)
    process.start()
    try:
        async with serving(options.engine, job(model, options), await asyncio.to_thread(control.recv)) as replica:
            return await rounds(replica, control, options)
    finally:
        process.kill()


@asynccontextmanager
async def serving(engine: str, spec: JobSpec, coordinator: str) -> AsyncIterator[Replica]:
    """A replica that serves version 1 of the job's model, and takes leases from the coordinator at this address."""
    import torch
    from transformers import AutoModelForCausalLM

    calls = Peer(coordinator)
    leases = Leases(calls, new_member_id("rollout"))
    replica = Replica(leases._member_id, engine, "bench", leases)
    server = Server(servicers(replica), "127.0.0.1", 0)
    await server.start()
    membership = replica.membership(calls, f"127.0.0.1:{server.port}", 60.0)
    await membership.join()
    loops = [asyncio.create_task(membership.run()), asyncio.create_task(leases.run())]
    try:
        peer = Peer(f"127.0.0.1:{server.port}")
        await configure(peer, spec)
        weights = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=getattr(torch, spec.rollout.dtype))
        await publish(peer, replica.member_id, export(weights), 1)
        yield replica
    finally:
        for loop in loops:
            loop.cancel()
        await replica.close()
        await server.stop(0.1)


async def rounds(replica: Replica, control: Connection, options: argparse.Namespace) -> dict[str, Any]:
    ways = ["replica", WITHOUT_SPANS] if options.no_direct else ["direct", "replica", WITHOUT_SPANS]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu_ms: dict[str, list[float]] = {way: [] for way in ways}
    spans: list[Span] = []
    recorded_tokens = 0
    RECORDER.export = spans.append
    for number in range(options.rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            RECORDER.enabled = way != WITHOUT_SPANS
            started, cpu = time.perf_counter(), time.process_time()
            direct = way == "direct"
            tokens = await (
                DIRECT[options.engine](replica, options) if direct else through_replica(replica, control, options)
            )
            if not number:  # the first round warms up
                spans.clear()
            else:
                recorded_tokens += tokens if way == "replica" else 0
                rates[way].append(tokens / (time.perf_counter() - started))
                cpu_ms[way].append(1e6 * (time.process_time() - cpu) / tokens)
    assert replica.engine is not None
    return {
        "engine": f"{options.engine} {replica.engine.release} on {replica.engine.device}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "options": {k: str(v) for k, v in vars(options).items()},
        "tokens_per_s": {way: [round(v) for v in values] for way, values in rates.items()},
        "median_tokens_per_s": {way: round(statistics.median(values)) for way, values in rates.items()},
        # Of this process alone, the one that a replica adds work to; neighbours hardly change it.
        "cpu_ms_per_1000_tokens": {way: round(statistics.median(values), 1) for way, values in cpu_ms.items()},
        "best_tokens_per_s": {way: round(max(values)) for way, values in rates.items()},
        **({} if options.no_direct else {"replica_over_direct": ratio(rates["replica"], rates["direct"])}),
        "with_over_without_spans": ratio(rates["replica"], rates[WITHOUT_SPANS]),
        "cpu_with_over_without_spans": ratio(cpu_ms["replica"], cpu_ms[WITHOUT_SPANS], best=min),
        "spans": span_costs(1000 * len(spans) / recorded_tokens, statistics.median(rates["replica"])),
    }


def span_costs(per_1000: float, tokens_per_s: float) -> dict[str, float]:
    """What spans cost a replica that records `per_1000` of them for 1,000 tokens. `share_of_a_core` is the part of one
    core's time that recording and packing them takes at `tokens_per_s`."""
    costs = recording()
    us = max(costs["record_block_us"], costs["record_past_us"]) + costs["pack_us"]
    return {
        "per_1000_tokens": round(per_1000, 1),
        "us_of_one": us,
        "share_of_a_core": round(per_1000 * us * tokens_per_s / 1e9, 5),
    }


def ratio(these: list[float], those: list[float], best: Callable[[list[float]], float] = max) -> dict[str, Any]:
    """What the ratios of two rounds that follow each other say, and the ratio of the best rounds: neighbours on the
    machine only ever slow a round down."""
    ratios = [a / b for a, b in zip(these, those, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
    return {
        "median": round(statistics.median(ratios), 4),
        "quartiles": [round(quartiles[at], 4) for at in (0, 2)] if quartiles else None,
        "best": round(best(these) / best(those), 4),
    }


async def through_vllm(replica: Replica, options: argparse.Namespace) -> int:
    """Tokens generated through AsyncLLM itself: all prompts at once, n samples a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm: Any = replica.engine._llm  # type: ignore[union-attr]
    wanted = SamplingParams(
        n=options.samples,
        temperature=1.0,
        max_tokens=options.tokens,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(number: int, tokens: list[int]) -> int:
        request_id = f"direct-{time.monotonic_ns()}-{number}"
        count = 0
        async for output in llm.generate({"prompt_token_ids": tokens}, wanted, request_id):
            count = sum(len(sample.token_ids) for sample in output.outputs)
        return count

    tokenised = prompts(llm.get_tokenizer(), options)
    return sum(await asyncio.gather(*(one(n, tokens) for n, tokens in enumerate(tokenised))))


async def through_sglang(replica: Replica, options: argparse.Namespace) -> int:
    """Tokens generated through SGLang's tokenizer manager itself: all prompts at once, n samples a request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager: Any = replica.engine._manager  # type: ignore[union-attr]
    wanted = {"n": options.samples, "temperature": 1.0, "max_new_tokens": options.tokens}

    async def one(tokens: list[int]) -> int:
        request = GenerateReqInput(input_ids=tokens, sampling_params=dict(wanted), return_logprob=True)
        found: Any = []
        async for output in manager.generate_request(request, None):
            found = output if isinstance(output, list) else [output]
        return sum(len(sample["output_ids"]) for sample in found)

    return sum(await asyncio.gather(*(one(tokens) for tokens in prompts(manager.tokenizer, options))))


def prompts(tokenizer: Any, options: argparse.Namespace) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(question(n), add_generation_prompt=True, return_dict=False)
        for n in range(options.prompts)
    ]


DIRECT = {"vllm": through_vllm, "sglang": through_sglang}
RUNNING = {"vllm": "max_num_seqs", "sglang": "max_running_requests"}


async def through_replica(replica: Replica, control: Connection, options: argparse.Namespace) -> int:
    """Tokens generated for leases: returns once the coordinator holds the last group."""
    before = replica.leases.generated_tokens
    control.send(options.prompts)
    dropped = await asyncio.to_thread(control.recv)
    assert not dropped, dropped
    return replica.leases.generated_tokens - before


if __name__ == "__main__":
    main()
