"""What SGLang's schedulers tell of themselves, and what its answers tell of its prefix cache.

A scheduler writes a snapshot of its load into shared memory after each prefill, after every 15th step of decoding
(`load_snapshot_publish_interval` of `ServerArgs`) and when it has nothing left to do. SGLang's tokenizer manager in
this process has a reader for it, so that reading asks no scheduler.
"""

from typing import Any

from services.rollout.engine import EngineStats


class SchedulerStats:
    """The numbers of one engine. Unlike SGLang's own metrics they need no `enable_metrics`."""

    def __init__(self) -> None:
        self._reader: Any = None
        self._prompt_tokens = self._cached_prompt_tokens = 0

    def attach(self, manager: Any) -> None:
        """`manager`: the tokenizer manager of an SGLang engine. A release without a reader tells nothing."""
        self._reader = getattr(manager, "load_snapshot_reader", None)

    def answered(self, prompt_tokens: int, meta: dict[str, Any]) -> None:
        """Counts a finished request. `meta`: the `meta_info` of SGLang's answer. Tokens that are prefilled again after
        a pause are not counted again."""
        self._prompt_tokens += prompt_tokens
        self._cached_prompt_tokens += int(meta.get("cached_tokens") or 0)

    @property
    def now(self) -> EngineStats | None:
        """The newest numbers of all schedulers that tell theirs: one for all ranks of a model, or one for each of the
        data-parallel copies, of which `cache_used` is that of the fullest. None before the first snapshot."""
        # The schedulers make an empty snapshot, of time 0, when they start.
        told = [] if self._reader is None else [one for one in self._reader.read_all() if one.timestamp]
        if not told:
            return None
        return EngineStats(
            running=sum(one.num_running_reqs for one in told),
            waiting=sum(one.num_waiting_reqs for one in told),
            cache_used=max(map(_cache_used, told)),
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )


def _cache_used(snapshot: Any) -> float:
    """Share of a scheduler's cache that running requests hold. SGLang rounds `token_usage` to four digits, which hides
    a few samples in a cache of millions of tokens; but it alone is that of the fullest cache of a model that has
    several, as with a sliding window."""
    used: float = snapshot.num_used_tokens / max(1, snapshot.max_total_num_tokens)
    return max(float(snapshot.token_usage), used)
