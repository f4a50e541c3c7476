"""The job that a replica is configured for: spec, tokenizer, scoring processes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.contracts.v1 import work_pb2
from millrace.data.chat import render
from millrace.data.pictures import Pictures, pictures_of
from millrace.data.row import PromptRow
from millrace.environments.built_in import BUILT_IN, VERIFIERS, OpenEnv, Verl, options_of
from millrace.errors import BadRow, InvalidJob
from millrace.ids import JobId, row_of
from millrace.spec import JobSpec
from millrace.spec.environment import Environment
from millrace.spec.model import Reward
from millrace.wire.channel import Peer
from services.rollout.environments.environment import Environments, ToolsAlone
from services.rollout.environments.processes import EnvironmentPool
from services.rollout.episode.chat import Chat
from services.rollout.episode.episode import Prompt
from services.rollout.judges.scorer import JudgeScorer
from services.rollout.pools.client import PoolClient
from services.rollout.pools.scores import PoolScorer, Teacher
from services.rollout.scoring.pool import RewardScorer, ScoringPool
from services.rollout.sessions.command import check_command

VERL_CLASS = "millrace.environments.verl.environment:VerlEnvironment"


class Job:
    """The job, with its tokenizer loaded and its scoring processes running. `close` ends them."""

    def __init__(
        self,
        job_id: JobId,
        spec: JobSpec,
        tokenizer: Any,
        scoring: ScoringPool,
        environments: Environments | None = None,
        chat: Chat | None = None,
        pictures: Pictures | None = None,
        judges: Sequence[JudgeScorer] = (),
        pools: Mapping[str, PoolClient] | None = None,
    ) -> None:
        """`chat`: the format in which the policy talks to `environments`, or to an agent; None without either. `pools`:
        a client of each pool, by the pool's name."""
        self.id = job_id
        self.spec = spec
        self.scoring = scoring
        self.judges = judges
        self.pools = pools or {}
        by_pools = [PoolScorer(term, self.pools[term.pool]) for term in spec.reward.pool_terms]
        self.reward = RewardScorer(scoring, [*judges, *by_pools])
        self.teacher = Teacher.of_job(spec, self.pools)
        self.environments = environments
        self.chat = chat
        self._tokenizer = tokenizer
        self._pictures = pictures

    @classmethod
    async def open(cls, job_id: JobId, spec: JobSpec, coordinator: Peer) -> "Job":
        """Loads the tokenizer and starts the processes of reward and environment. The `coordinator` knows where the
        replicas of pools are. Raises InvalidJob."""
        if spec.rollout.agent is not None:
            check_command(spec.rollout.agent)
        pools = {pool.name: PoolClient(coordinator, job_id, pool) for pool in spec.pools}
        judges = [JudgeScorer(term, pools) for term in spec.reward.judge_terms]
        tokenizer = await asyncio.to_thread(_load_tokenizer, spec)
        pictures = await asyncio.to_thread(pictures_of, spec.model.path, spec.data.images)
        terms = spec.reward.terms(procedural=bool(spec.data.procedural))
        scoring = ScoringPool.of_job(spec.reward, terms, spec.reward.workers)
        await scoring.start()
        environment = spec.rollout.environment
        environments = None if environment is None else environments_of(environment, spec.reward)
        try:
            if environments is not None:
                await environments.start()
            tools = environments.tools if environments is not None else ()
            chat = await asyncio.to_thread(_chat, spec, tokenizer, tools)
        except BaseException:
            await scoring.close()
            if environments is not None:
                await environments.close()
            raise
        return cls(job_id, spec, tokenizer, scoring, environments, chat, pictures, judges, pools)

    async def close(self) -> None:
        await self.scoring.close()
        for judge in self.judges:
            await judge.close()
        for pool in self.pools.values():
            await pool.close()
        if self.environments is not None:
            await self.environments.close()

    async def prompt(self, lease: work_pb2.Lease) -> Prompt:
        """The lease's prompt as tokens. Raises BadRow if it does not go through the tokenizer or chat template, or an
        image cannot be used."""
        row = PromptRow(
            index=row_of(lease.prompt_id),
            data_source=lease.data_source,
            prompt=_decoded(lease.prompt, "prompt", lease),
            ground_truth=_decoded(lease.ground_truth, "ground_truth", lease),
            extra_info=_decoded(lease.extra_info, "extra_info", lease) or {},
            images=tuple(lease.images),
        )
        return await asyncio.to_thread(self._render, row)

    def _render(self, row: PromptRow) -> Prompt:
        data = self.spec.data
        rendered = render(
            row,
            self._tokenizer,
            max_tokens=data.max_prompt_tokens,
            overlong=data.overlong_prompts,
            chat_template_options=data.chat_template_options,
            pictures=self._pictures,
        )
        text = str(self._tokenizer.decode(rendered.short_ids or rendered.token_ids))
        if self._pictures is None or not rendered.images:
            return Prompt(row, rendered, text)
        return Prompt(row, rendered, text, str(self._tokenizer.decode([self._pictures.token])))


def _chat(spec: JobSpec, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Chat | None:
    """The format in which the policy talks to the job's environment or agent; None if it has neither."""
    player = spec.rollout.environment or spec.rollout.agent
    if player is None:
        return None
    field = "rollout.agent" if spec.rollout.environment is None else "rollout.environment"
    return Chat(tokenizer, player.renderer, player.renderer_options, spec.data.chat_template_options, tools, field)


def _load_tokenizer(spec: JobSpec) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        what = f"model.path: the tokenizer in {spec.model.path} cannot be loaded: {error}."
        raise InvalidJob(
            what, "save it in the model folder; every service needs that folder at the same path."
        ) from error


def _decoded(value: str, field: str, lease: work_pb2.Lease) -> Any:
    """The value of a JSON field of the lease; None if the field is empty. Raises BadRow."""
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"prompt {lease.prompt_id}: {field} is not JSON: {error}.", "fix the row.") from error


def environments_of(environment: Environment, reward: Reward) -> Environments | None:
    """The environment of a job, not started, with the limits of its `reward`; None if a host plays the episodes by
    itself. Raises InvalidJob."""
    if environment.name == VERIFIERS:
        return None
    itself = _itself(environment, reward)
    if not environment.mcp:
        return itself
    from services.rollout.environments.mcp_tools import WithServers

    return WithServers.of_job(itself, environment, reward)


def _itself(environment: Environment, reward: Reward) -> Environments:
    if environment.name not in BUILT_IN:
        return EnvironmentPool.of_job(environment, reward)
    options = options_of(environment.name, environment.options)
    if isinstance(options, OpenEnv):
        from services.rollout.environments.openenv import OpenEnvServer

        return OpenEnvServer(options, environment.processes, environment.call_s)
    if isinstance(options, Verl):
        return EnvironmentPool.of_class(VERL_CLASS, environment, reward, options.folders)
    return ToolsAlone(environment.episodes_at_once)
