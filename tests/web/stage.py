"""A coordinator whose simulated members answer with texts, tokens and metrics that look like those of a real job."""

import asyncio
import contextlib
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import common_pb2, fleet_pb2, trainer_pb2, work_pb2
from millrace.data.columns.messages import Message, text_of
from millrace.data.row import PromptRow, write_rows
from millrace.ids import MemberId
from millrace.telemetry.metrics.histograms import ADVANTAGES, IMPORTANCE_RATIOS
from millrace.telemetry.spans.batches import taken
from millrace.telemetry.spans.context import TraceContext, current
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Recorder, Span
from millrace.telemetry.usage import GpuReading, HostMemory, usage_message
from millrace.wire.arrays import pack_floats, pack_logprobs, pack_tokens, unpack_logprobs
from tests.services.coordinator.cluster import Cluster
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import Member, Shape, SimulatedReplica, SimulatedTrainer

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
ROWS = 400
MARK = "<picture>"
"""What stands for an image in the text of a prompt."""

GB = 1_000_000_000
USAGE = usage_message(
    [("there", HostMemory(9 * GB, 40 * GB, 256 * GB))],
    [("there", GpuReading(number, 61 * GB, 80 * GB, busy, 350.0, 54.0)) for number, busy in (("0", 0.9), ("1", 0.6))],
    cache_used=0.4,
)
"""What every simulated member reports."""


def tokens_of(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def shown_text(message: Message) -> str:
    """The text of a message with a mark for each image."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return "".join(part["text"] if part["type"] == "text" else MARK for part in parts)


class TellsSpans(Member):
    """Sends its spans with its heartbeats, as services do."""

    source: LaneKind

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.recorder = Recorder()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            spans, count = taken(self.recorder, MemberId(self.id), self.source)
            beat = fleet_pb2.HeartbeatRequest(
                member_id=self.id, version=self.version, tokens=self.tokens, running=self.running
            )
            beat.spans, beat.span_count = spans, count
            beat.usage.CopyFrom(USAGE)
            await self.coordinator.call(FleetRpc.Heartbeat, beat)

    def was(self, kind: SpanKind, parent: TraceContext, start_s: float, end_s: float, **figures: float) -> TraceContext:
        """Records a span; answers its context."""
        own = parent.child()
        self.recorder.add(Span(kind, own, parent.span_id, start_s, end_s, figures=figures))
        return own


class TalkingReplica(TellsSpans, SimulatedReplica):
    """Adds two numbers, better with every version, and in one of four episodes asks a calculator."""

    source = LaneKind.ROLLOUT

    async def _answer(self, lease: work_pb2.Lease) -> None:
        began_s = time.time()
        await super()._answer(lease)
        root = TraceContext.parse(lease.traceparent, job_id=lease.ref.job_id, group=lease.prompt_id)
        if root is None:
            return
        ended_s = time.time()
        held = self.was(SpanKind.LEASE, root, began_s, ended_s)
        generated_s = began_s + 0.8 * (ended_s - began_s)
        for _ in range(lease.sampling.samples):
            until_s = began_s + (0.4 + 0.6 * self._chance.random()) * (generated_s - began_s)
            self.was(SpanKind.GENERATE, held, began_s, until_s, tokens=40.0)
        self.was(SpanKind.SCORE, held, generated_s, ended_s, samples=lease.sampling.samples)

    def group(self, lease: work_pb2.Lease) -> common_pb2.Group:
        group = super().group(lease)
        messages = json.loads(lease.prompt) if lease.prompt.startswith("[") else []
        prompt = "".join(f"{each['role']}: {shown_text(each)}\n" for each in messages) if messages else lease.prompt
        group.prompt_text = prompt
        group.prompt_tokens = pack_tokens(tokens_of(prompt))
        group.data_source = "sums"
        if messages:
            group.question = text_of(messages[-1])
        if lease.images:
            group.image_mark = MARK
        truth = json.loads(group.ground_truth or "0")
        for trajectory in group.trajectories:
            right = self._chance.random() < 1 - math.exp(-(self.version + 1) / 12)
            answer = str(truth if right else int(truth) + self._chance.randint(1, 9))
            self._say(trajectory, f"The sum of both numbers is {answer}.", calls=self._chance.random() < 0.25)
            trajectory.reward = float(right)
            trajectory.reward_details = json.dumps({"acc": float(right), "format": 1.0, "pred": answer})
        return group

    def _say(self, one: common_pb2.Trajectory, text: str, calls: bool) -> None:
        turns = ["<call>add</call>", text] if calls else [text]
        given = "\ntool: the result is above\n"
        one.ClearField("versions")
        one.ClearField("turns")
        tokens: list[int] = []
        for number, turn in enumerate(turns):
            if number:
                tokens += tokens_of(given)
            start = len(tokens)
            tokens += tokens_of(turn)
            middle = (start + len(tokens)) // 2
            older = max(0, self.version - 1)
            one.versions.add(version=older, start=start, end=middle)
            one.versions.add(version=self.version, start=middle, end=len(tokens))
            if calls:
                one.turns.add(start=start, end=len(tokens), text=turn, given_text=given if number else "", reward=0.0)
        sampled = sum(len(turn) for turn in turns)
        one.tokens = pack_tokens(tokens)
        one.logprobs = pack_logprobs([-min(9.0, self._chance.expovariate(1.6)) for _ in range(sampled)])
        one.text = "" if calls else text


class MeasuringTrainer(TellsSpans, SimulatedTrainer):
    """Reports metrics that change from step to step."""

    source = LaneKind.TRAINER

    async def Step(self, request: trainer_pb2.StepRequest, context: Any) -> trainer_pb2.StepResponse:
        began_s = time.time()
        answer = await super().Step(request, context)
        if (caller := current()) is not None:
            ended_s = time.time()
            whole = self.was(SpanKind.TRAIN, caller, began_s, ended_s)
            assessed_s = began_s + 0.3 * (ended_s - began_s)
            self.was(SpanKind.ASSESS, whole, began_s, assessed_s)
            self.was(SpanKind.UPDATE, whole, assessed_s, ended_s)
        chance, step = random.Random(request.step), request.step
        answer.metrics["actor/grad_norm"] = 0.6 + 0.3 * chance.random() + 2 / (1 + step)
        answer.metrics["actor/entropy"] = 0.2 + 1.4 * math.exp(-step / 25) + 0.05 * chance.random()
        answer.metrics["actor/pg_loss"] = 0.02 * chance.gauss(0, 1)
        answer.metrics["rollout_corr/k3_kl"] = 0.0004 * (1 + chance.random())
        answer.metrics["timing_s/update_actor"] = self.step_s
        ratios = [math.exp(chance.gauss(0, 0.02)) for _ in range(2000)]
        for declared, values in (
            (IMPORTANCE_RATIOS, ratios),
            (ADVANTAGES, [chance.gauss(0, 1) for _ in ratios]),
        ):
            made = declared.of(values)
            assert made is not None
            answer.histograms[declared.key].CopyFrom(trainer_pb2.Histogram(edges=made.edges, counts=made.counts))
        return answer

    def told(self, group: common_pb2.Group) -> trainer_pb2.TrainedGroup:
        """Log-probabilities near the engine's, a few of them far away, and the advantages of GRPO."""
        chance, rewards = random.Random(group.prompt_id), [trajectory.reward for trajectory in group.trajectories]
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6
        told = trainer_pb2.TrainedGroup(prompt_id=group.prompt_id)
        for trajectory in group.trajectories:
            logprobs = unpack_logprobs(trajectory.logprobs).tolist()
            apart = [chance.gauss(0, 0.4 if chance.random() < 0.08 else 0.02) for _ in logprobs]
            trained = [min(-1e-4, logprob + gap) for logprob, gap in zip(logprobs, apart, strict=True)]
            advantages = [(trajectory.reward - mean) / spread] * len(logprobs)
            told.trajectories.add(logprobs=pack_logprobs(trained), advantages=pack_floats(advantages))
        return told


class Stage:
    """The coordinator and its members, which run in a thread of their own."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.url = f"http://127.0.0.1:{coordinator.http_port}"
        self.cluster = Cluster(coordinator)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._write()

    def _write(self) -> None:
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
        (model / "chat_template.jinja").write_text("{{ messages }}")
        (model / "model.safetensors").write_bytes(b"")
        tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate(CHARACTERS)}, unk_token="?"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(model / "tokenizer.json"))
        chance = random.Random(0)
        pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(ROWS)]
        asked = [[{"role": "user", "content": f"What is {a} + {b}? Say it in a sentence."}] for a, b in pairs]
        rows = [PromptRow(n, "sums", prompt, ground_truth=str(sum(pairs[n]))) for n, prompt in enumerate(asked)]
        write_rows(self.folder / "train.jsonl", rows)
        write_rows(self.folder / "held_out.jsonl", rows[:8])

    def spec(self, name: str, steps: int, **changed: Any) -> dict[str, Any]:
        return {
            "name": name,
            "output": str(self.folder / name),
            "model": {"path": str(self.folder / "model")},
            "data": {"files": [str(self.folder / "train.jsonl")], "max_prompt_tokens": 128},
            "reward": {"function": "exact"},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 128, "lease_s": 5.0},
            "trainer": {"token_budget": 2048},
            "schedule": {"steps": steps, "prompts_per_step": 4, "max_staleness": 2, "save_every_steps": 10},
            "evaluation": {"files": [str(self.folder / "held_out.jsonl")], "samples_per_prompt": 1, "every_steps": 10},
        } | changed

    def picture_spec(self, name: str, steps: int) -> dict[str, Any]:
        """A job whose prompts have two images each: a file of its row alone, and one of all rows."""
        folder = self.folder / f"{name} pictures"
        (folder / "model").mkdir(parents=True)
        for file in (self.folder / "model").iterdir():
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        (folder / "model" / "config.json").write_text(json.dumps(config))
        (folder / "model" / "preprocessor_config.json").write_text("{}")
        wide = folder / "wide.jpeg"
        Image.linear_gradient("L").resize((1600, 500)).save(wide)
        rows = []
        for n in range(12):
            own = folder / f"{n}.png"
            Image.new("RGB", (90, 60), (20 * n, 120, 200)).save(own)
            parts = [{"type": "text", "text": "Is "}, {"type": "image", "image": str(own)}]
            parts += [{"type": "text", "text": " darker than "}, {"type": "image", "image": str(wide)}]
            parts += [{"type": "text", "text": "? Say it in a sentence."}]
            rows.append({"prompt": [{"role": "user", "content": parts}], "ground_truth": str(n)})
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = {"files": [str(folder / "rows.jsonl")], "images": {}, "max_prompt_tokens": 128}
        model = {"path": str(folder / "model")}
        return self.spec(name, steps, model=model, data=data, evaluation=None)

    def run(self, work: Coroutine[Any, Any, Any], within_s: float = 120.0) -> Any:
        """What `work` returns, run in the members' thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def trainer(self, step_s: float = 0.05) -> MeasuringTrainer:
        made: MeasuringTrainer = self.run(self._join(lambda: MeasuringTrainer(self.coordinator.address, step_s=step_s)))
        return made

    def replica(self, seconds: float = 0.05) -> TalkingReplica:
        made: TalkingReplica = self.run(
            self._join(lambda: TalkingReplica(self.coordinator.address, Shape(seconds=seconds)))
        )
        return made

    async def _join(self, make: Callable[[], Any]) -> Any:
        """A member that `make` makes in the members' event loop."""
        member = make()
        await member.start()
        self.cluster.members.append(member)
        return member

    def submit(self, spec: dict[str, Any]) -> str:
        return self.coordinator.client.submit(spec).id

    def close(self) -> None:
        self.run(self.cluster.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def stage(folder: Path, environment: dict[str, str] | None = None) -> Iterator[Stage]:
    with running(folder / "state", environment=environment) as coordinator:
        made = Stage(folder, coordinator)
        try:
            yield made
        finally:
            made.close()
