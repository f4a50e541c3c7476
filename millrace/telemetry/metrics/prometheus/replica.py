"""Prometheus metrics of a replica: its engine and its leases."""

from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import counter, gauge

ENGINE_RUNNING = gauge(
    "millrace_engine_running_samples", Unit.COUNT, "Samples that the engine generates now, as the engine counts."
)
ENGINE_WAITING = gauge(
    "millrace_engine_waiting_samples", Unit.COUNT, "Samples that wait in the engine's queue, as the engine counts."
)
ENGINE_CACHE_USED = gauge(
    "millrace_engine_cache_used_ratio",
    Unit.SHARE,
    "Part of the engine's cache of keys and values that running samples hold; of the transformers engine the part of "
    "its slots. NaN until the engine has reported it.",
)
PROMPT_TOKENS = counter(
    "millrace_engine_prompt_tokens_total",
    Unit.TOKENS,
    "Tokens of prompts and of earlier turns that the engine got, if it has a cache of them (vllm, and sglang when "
    "their samples are done).",
)
CACHED_PROMPT_TOKENS = counter(
    "millrace_engine_cached_prompt_tokens_total",
    Unit.TOKENS,
    "Of these, those whose keys and values were in its prefix cache.",
)
ENGINE_CAPACITY = gauge(
    "millrace_engine_capacity_samples",
    Unit.COUNT,
    "Samples that the engine runs at once, by its settings and the size of its cache; 0 until it has started.",
)
ENGINE_SLOTS = gauge(
    "millrace_engine_used_slots",
    Unit.COUNT,
    "Samples that the replica gives the engine at once: its capacity, and fewer if its cache turned out to be too "
    "small for them; 0 until the replica has served a job.",
)
PREEMPTIONS = counter(
    "millrace_engine_preemptions_total",
    Unit.COUNT,
    "Samples that the engine had to compute again because its cache was full (vllm). Those that a publication has "
    "computed again are not counted.",
)
EPISODE_LIMIT = gauge(
    "millrace_episode_limit",
    Unit.COUNT,
    "Episodes of several turns that go on at once at most: as the job allows, and fewer if the engine's cache turned "
    "out to be too small to keep their earlier turns; 0 without such a limit.",
)
EPISODES_OPEN = gauge(
    "millrace_open_episodes", Unit.COUNT, "Episodes that go on now: they generate, or wait for their environment."
)
EPISODES_HELD_BACK = gauge(
    "millrace_held_back_episodes",
    Unit.COUNT,
    "Episodes of leased prompts that wait until the engine's cache has room for them.",
)
PREFIX_TOKENS = counter(
    "millrace_episode_prefix_tokens_total",
    Unit.TOKENS,
    "Tokens of the turn before with which turns of episodes began, under the same weights and in whole blocks of the "
    "engine's cache (vllm, sglang).",
)
CACHED_PREFIX_TOKENS = counter(
    "millrace_episode_cached_prefix_tokens_total",
    Unit.TOKENS,
    "Of these, those whose keys and values were still in the engine's cache. The others were computed again.",
)
LEASES_HELD = gauge("millrace_leases_held", Unit.COUNT, "Prompts that the replica works on.")
DRAINING = gauge(
    "millrace_replica_draining", Unit.COUNT, "1 while the replica takes no new leases and finishes those it has."
)
JUDGE_WAITING = gauge(
    "millrace_judge_waiting_requests",
    Unit.COUNT,
    "Requests to a judge that are asked or wait, by the name of the part of the reward.",
    "judge",
)
JUDGE_DOWN = gauge(
    "millrace_judge_down_seconds",
    Unit.SECONDS,
    "How long a judge has not answered this replica; 0: it answers.",
    "judge",
)
JUDGE_REQUESTS = counter(
    "millrace_judge_requests_total",
    Unit.COUNT,
    "Requests to a judge by how they ended: answered, refused, given_up; and repeated, of those that were asked again.",
    "judge",
    "outcome",
)
