"""One session: an episode whose turns are asked for by an agent, request by request."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from millrace.contracts.v1 import common_pb2
from millrace.errors import BadRow, MillraceError, wrong_value
from millrace.telemetry.spans.context import current, within
from services.rollout.dialects.requests import Refusals, Refused
from services.rollout.dialects.turns import SampledTurn, Speaker, TurnRequest
from services.rollout.engine import Completion, Sampling, StopReason
from services.rollout.episode.chat import Message
from services.rollout.episode.conversation import Conversation, Strand, TokenStrand
from services.rollout.episode.episode import Episode, Prompt, Trajectory
from services.rollout.scoring.scored import Scored
from services.rollout.sessions.policy import ESCAPED, LARGE, Policy

T = TypeVar("T")
S = TypeVar("S", bound=Strand)
MOST_BODIES = 16
"""Requests of one session whose bodies are read at the same time."""
SHORT = 2048
"""Below this number of characters and tokens, tokenizing inline is faster than using a thread."""


class AgentFailed(Exception):
    """The agent's episode cannot be used: it took too long, its command failed, or it asked for no turn."""


@dataclass(eq=False)
class _Held(Generic[S]):
    """A strand, and what the session knows of it."""

    strand: S
    tools: str = ""
    """The tools of a conversation as text; empty for tokens."""
    busy: bool = True
    """Whether a turn of it is being sampled."""
    numbers: list[int] = field(default_factory=list)
    """The numbers of its turns among those of the session."""
    called_at: float = 0.0
    """When the last turn called tools; 0.0 if it did not."""


class Session:
    """An episode of an agent, whose turns are recorded as tokens. Every method that asks for a turn raises Refused."""

    def __init__(self, policy: Policy, prompt: Prompt, reruns: int = 0) -> None:
        """`reruns`: how often the episode was run before."""
        self.id = f"session-{secrets.token_hex(8)}"
        self.key = secrets.token_urlsafe(32)
        self.prompt = prompt
        self.policy = policy
        self.ended = asyncio.Event()
        """Set once the agent ended the episode, or the session failed."""
        self.failure: MillraceError | None = None
        """Why it cannot go on."""
        self.deadline = 0.0
        """The time of the event loop's clock at which it ends; 0.0 until somebody plays the episode."""
        self.histories: dict[str, Sequence[Message]] = {}
        """The messages up to each response that a client may continue, by the response's id."""
        self._account = common_pb2.EpisodeAccount(end=common_pb2.EPISODE_END_DONE, reruns=reruns)
        self._conversations: list[_Held[Conversation]] = []
        self._sequences: list[_Held[TokenStrand]] = []
        self.turns = self._sampled = 0
        """Turns that were sampled, and their tokens."""
        self._requests = self._bodies = 0
        """Requests that are being answered, and those of which the body is being read."""
        self._rewards: dict[int, float] = {}
        self._score: float | None = None
        self._running: set[asyncio.Task[tuple[Completion, float]]] = set()
        self._context = current()  # requests come from other tasks than the lease's

    @property
    def speaker(self) -> Speaker:
        """The policy, as answers name it."""
        policy = self.policy
        decode, sampling = policy.chats.without_tools.decode, policy.sampling
        return Speaker(self.id, policy.model, decode, sampling.temperature, sampling.top_p)

    @property
    def at_limit(self) -> bool:
        """Whether there is no room for another turn, or none is allowed."""
        return bool(self._account.end != common_pb2.EPISODE_END_DONE)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    async def sample_turn(self, asked: TurnRequest) -> SampledTurn:
        """Samples the turn that follows the messages of `asked`."""
        with self._asked():
            self._check_text(asked)
            held = await self._conversation(asked)
            conversation = held.strand
            with _in_use(held, self._conversations):
                prompt_tokens = len(conversation.prompt)
                completion, engine_s = await self._sample(conversation, asked)
                number = self._numbered(held, completion)
                size = prompt_tokens + len(completion.tokens)
                message = await computed(lambda: conversation.add(completion, calls=asked.calls), size)
                held.called_at = time.monotonic() if message.get("tool_calls") else 0.0
                return SampledTurn(number, message, completion, prompt_tokens, engine_s)

    async def sample_after(self, tokens: Sequence[int], asked: TurnRequest) -> SampledTurn:
        """Samples the turn that follows `tokens`; of `asked` only the limits count."""
        self._check_open()
        held = self._sequence(tokens)
        with self._asked(), _in_use(held, self._sequences):
            completion, engine_s = await self._sample(held.strand, asked)
            held.strand.add(completion)
            return SampledTurn(self._numbered(held, completion), {}, completion, len(tokens), engine_s)

    async def count(self, asked: TurnRequest) -> int:
        """Number of tokens of the prompt of `asked`, as the first request of a conversation."""
        self._check_open()
        with self._asked():
            size = self._check_text(asked)
            chat, _ = self.policy.chats.of(asked.tools)
            return len(await self._rendered(lambda: chat.render(asked.messages), size))

    def reward(self, value: float, turn: int | None = None) -> None:
        """Adds to the reward of a turn, or of the whole episode. Raises Refused."""
        self._check_open()
        if turn is None:
            self._score = (self._score or 0.0) + value
        elif 0 <= turn < self.turns:
            self._rewards[turn] = self._rewards.get(turn, 0.0) + value
        else:
            why = "there is no such turn" if self.turns else "there is no turn yet"
            raise Refused.of(wrong_value("turn", turn, why, f"name one of {self.turns} turns, from 0."))

    def end(self) -> None:
        """The agent has finished. Idempotent."""
        self.ended.set()

    def close(self) -> None:
        """Ends the session: what it has in the engine is aborted, further requests are refused."""
        self.ended.set()
        for task in self._running:
            task.cancel()

    def episode(self) -> Episode:
        """What was recorded. Raises AgentFailed if that is nothing."""
        known: list[_Held[Conversation] | _Held[TokenStrand]] = [*self._conversations, *self._sequences]
        used = sorted((each for each in known if each.numbers), key=lambda each: each.numbers[-1])
        if not used:
            raise AgentFailed("the agent asked for no turn")
        trajectories = [one for each in used for one in self._rewarded(each)]
        first, rendered = trajectories[0], self.prompt.rendered.token_ids
        if first.prompt is not None and first.prompt.tolist() == rendered:
            trajectories[0] = replace(first, prompt=None, prompt_text="")
        score = 0.0 if self._score is None and self._rewards else self._score
        return Episode(tuple(trajectories), None if score is None else Scored(score, {}), self._account)

    def _rewarded(self, held: _Held[Conversation] | _Held[TokenStrand]) -> list[Trajectory]:
        """The trajectories of a strand with the rewards of its turns."""
        numbers = iter(held.numbers)
        return [
            replace(one, turns=tuple(replace(turn, reward=self._rewards.get(next(numbers), 0.0)) for turn in one.turns))
            for one in held.strand.trajectories()
        ]

    # Finding what a request continues.

    async def _conversation(self, asked: TurnRequest) -> _Held[Conversation]:
        """The conversation that a request continues, busy. Its tokens end where the turn begins."""
        self._check_open()
        chat, key = self.policy.chats.of(asked.tools)
        for held in _idle(self._conversations):
            if held.tools == key and (new := held.strand.added_by(asked.messages)) is not None:
                held.busy = True
                await self._add_messages(held, new)
                return held
        conversation = self._again(asked.messages, key)
        if conversation is None:
            conversation = await self._rendered(lambda: Conversation(chat, asked.messages), _text_bytes(asked))
        held = _Held(conversation, key)
        self._conversations.append(held)
        return held

    def _sequence(self, tokens: Sequence[int]) -> _Held[TokenStrand]:
        """The sequence that `tokens` extend, busy; a new one if they extend none. Raises Refused."""
        for held in _idle(self._sequences):
            if (added := held.strand.added_by(tokens)) is not None:
                self.policy.chats.check_tokens(added)
                held.strand.give(added)
                held.busy = True
                return held
        self.policy.chats.check_tokens(tokens)
        self._sequences.append(_Held(TokenStrand(self.policy.chats.without_tools, tokens)))
        return self._sequences[-1]

    async def _add_messages(self, held: _Held[Conversation], new: Sequence[Message]) -> None:
        """Adds to a conversation what its client sent since the last turn."""
        if not new:
            return
        try:
            size = len(held.strand.prompt) + _text_bytes(TurnRequest(new))
            await self._rendered(lambda: held.strand.tell(new), size)
        except BaseException:
            held.busy = False
            raise
        results = sum(message["role"] == "tool" for message in new)
        self._account.tool_calls += results
        if results and held.called_at:
            self._account.tool_s += time.monotonic() - held.called_at

    def _again(self, messages: Sequence[Message], tools: str) -> Conversation | None:
        """A conversation that begins where an earlier request had begun a turn: the client asks once more."""
        asked = (held.strand.again(messages) for held in self._conversations if held.tools == tools)
        return next((conversation for conversation in asked if conversation is not None), None)

    # Sampling.

    async def _sample(self, strand: Strand, asked: TurnRequest) -> tuple[Completion, float]:
        """The next turn of a strand, and the seconds that the engine took for it. Raises Refused."""
        room = self.policy.room(strand)
        if room <= 0:
            self._account.end = common_pb2.EPISODE_END_TOKENS
            limit = self.policy.longest
            what = f"the conversation has {len(strand.prompt)} tokens, a trajectory at most {limit} and at most "
            what += f"{self.policy.sampling.max_response_tokens} after its prompt: there is no room for another turn."
            raise Refused(Refusals.TOO_LONG, what, "end the session, or send a shorter history.", "messages")
        if self.turns + len(self._running) >= self.policy.max_turns:
            self._account.end = common_pb2.EPISODE_END_TURNS
            what = f"the session has had its {self.policy.max_turns} turns (rollout.agent.max_turns)."
            raise Refused(Refusals.ENDED, what, "end the session.")
        most = min(room, asked.max_tokens or room)
        completion, engine_s = await self._generated(strand, self.policy.asked(most, asked.stop))
        cut = most == room and completion.stop_reason is StopReason.LENGTH and not self.policy.cut_by_turn(room)
        self._account.end = common_pb2.EPISODE_END_TOKENS if cut else common_pb2.EPISODE_END_DONE
        return completion, engine_s

    async def _generated(self, strand: Strand, sampling: Sampling) -> tuple[Completion, float]:
        with within(self._context):
            task = asyncio.create_task(self._timed(strand, sampling))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            self._check_open()
            raise
        except MillraceError as error:
            self.failure = error
            self.ended.set()
            raise Refused(Refusals.UNAVAILABLE, error.what, "claim another episode.") from error

    async def _timed(self, strand: Strand, sampling: Sampling) -> tuple[Completion, float]:
        """A sample of the engine, and how long it took, seconds."""
        asked, slot = time.perf_counter(), self.policy.slot
        with slot.taken():
            completion = await slot.generate(self.policy.engine, strand.prompt, sampling, seen=strand.seen)
        return completion, time.perf_counter() - asked

    def _numbered(self, held: _Held[S], completion: Completion) -> int:
        """The number of the next turn, `sample`, which is one of `held`."""
        self._sampled += len(completion.tokens)
        number, self.turns = self.turns, self.turns + 1
        held.numbers.append(number)
        return number

    # Limits.

    @contextmanager
    def reading(self) -> Iterator[int]:
        """While the body of a request is read; the bytes that it may have. Raises Refused."""
        if self._bodies >= MOST_BODIES:
            raise Refused(Refusals.FULL, f"{self.id} is sending {MOST_BODIES} requests already.", "ask again later.")
        self._bodies += 1
        try:
            yield ESCAPED * self.policy.largest_text(self._sampled)
        finally:
            self._bodies -= 1

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """While a request is answered. Raises Refused if as many are as the session has turns left."""
        if self._requests >= max(1, self.policy.max_turns - self.turns):
            raise Refused(Refusals.FULL, f"{self.id} has {self._requests} requests in progress.", "ask again later.")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def _check_text(self, asked: TurnRequest) -> int:
        """Bytes of the text. Raises Refused for more than the tokens of a trajectory can stand for, before anything is
        made of it."""
        size = _text_bytes(asked)
        if size > (most := self.policy.largest_text(self._sampled)):
            self._account.end = common_pb2.EPISODE_END_TOKENS
            what = f"the request has {size} bytes of text, and a trajectory at most {self.policy.longest} tokens, for "
            what += f"which there are at most {most} bytes."
            raise Refused(Refusals.TOO_LONG, what, "end the session, or send a shorter history.", "messages")
        return size

    async def _rendered(self, render: Callable[[], T], size: int) -> T:
        """Runs what makes `size` characters of messages into tokens. Raises Refused if the chat format refuses the
        messages."""
        try:
            async with self.policy.chats.large if size > LARGE else nullcontext():
                return await computed(render, size)
        except BadRow as error:
            raise Refused(Refusals.INVALID, error.what, error.fix, "messages") from error

    def _check_open(self) -> None:
        """Raises Refused if the session is over."""
        if self.ended.is_set():
            raise Refused(Refusals.ENDED, f"{self.id} is over.", "claim another episode.")


def _idle(strands: list[_Held[S]]) -> list[_Held[S]]:
    """Strands that wait for a request, the last ones first."""
    return [each for each in reversed(strands) if not each.busy]


@contextmanager
def _in_use(held: _Held[S], strands: list[_Held[S]]) -> Iterator[None]:
    """Marks a strand as free when its request is answered. A strand without a turn is forgotten: what was refused takes
    no memory."""
    try:
        yield
    finally:
        held.busy = False
        if not held.numbers:
            strands.remove(held)


def _text_bytes(asked: TurnRequest) -> int:
    """Bytes of the text in a request."""
    size, left = 0, list[Any]([asked.messages, asked.tools])
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each.encode(errors="surrogatepass"))
        elif isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, Sequence):
            left += each
        else:
            size += 1
    return size


async def computed(work: Callable[[], T], size: int) -> T:
    """The result of `work` on `size` characters and tokens, which runs in a thread if they are many. A caller that
    is cancelled waits for its end: what a thread changes is free for others only then."""
    if size <= SHORT:
        return work()
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
