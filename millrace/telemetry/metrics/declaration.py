"""What the declaration of a step metric says."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial


class Owner(StrEnum):
    """The one service that measures a metric."""

    TRAINER = "trainer"
    """Sent to the coordinator in the answer of a step."""
    COORDINATOR = "coordinator"
    """Computed by the coordinator from what it knows of groups, of the fleet and of its own waiting."""
    REPLICA = "replica"
    """Measured by the rollout replicas; the coordinator puts statistics over them into the row."""


class Unit(StrEnum):
    """The unit of a metric."""

    BYTES = "bytes"
    CELSIUS = "°C"
    COUNT = "count"
    GIBIBYTES = "GiB"
    LEARNING_RATE = "learning rate"
    LOSS = "loss"
    MILLISECONDS = "ms"
    NATS = "nats"
    NORM = "norm"
    PERPLEXITY = "perplexity"
    PROBABILITY = "probability"
    RATIO = "ratio"
    """A quotient of two values of the same kind; 1 if they are equal, except if the meaning says otherwise."""
    REPORTED = "any"
    """Whatever a user's own function reports."""
    REWARD = "reward"
    REWARD_SQUARED = "reward²"
    SECONDS = "s"
    SHARE = "share"
    """From 0 to 1."""
    STEP = "step"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens/s"
    VERSIONS = "versions"
    WATTS = "W"


@dataclass(frozen=True)
class Placeholder:
    """The variable part of a family of keys."""

    meaning: str
    pattern: str
    """Regular expression of the texts that may replace it."""


PLACEHOLDERS = {
    "criterion": Placeholder(
        "verl's name of a rejection: `token`, `seq_sum`, `seq_mean` or `seq_max`, and `_k1`, `_k2` or `_k3`",
        r"(?:token|seq_sum|seq_mean|seq_max)_k[123]",
    ),
    "data_source": Placeholder("the `data_source` of the prompts, as the data files have it", r".*"),
    "engine": Placeholder("the name of a rollout engine", r"[a-z0-9_]+"),
    "k": Placeholder("a number of answers, at least 2", r"\d+"),
    "kept": Placeholder(
        "`weights`, `gradients`, `optimizer`, `adapter`, `reference` or `critic` (weights, gradients and optimizer)",
        r"weights|gradients|optimizer|adapter|reference|critic",
    ),
    "n": Placeholder("`evaluation.samples_per_prompt`", r"\d+"),
    "name": Placeholder("a name that the user's own function reports", r".+"),
    "part": Placeholder(
        "`gen`, `ref`, `values`, `adv`, `update_critic` or `update_actor`",
        r"gen|ref|values|adv|update_critic|update_actor",
    ),
    "phase": Placeholder(
        "`load`, `scoring` (passes before the update), `update`, or `publication`, the one before the step",
        r"load|scoring|update|publication",
    ),
    "predicted": Placeholder(
        "one of those, `gathered`, `activations`, `logits` or `staging`",
        r"weights|gradients|optimizer|adapter|reference|critic|gathered|activations|logits|staging",
    ),
    "reward_part": Placeholder("a name in `reward.functions` or `reward.parts`", r".+"),
    "statistic": Placeholder("`mean`, `max` or `min`", r"mean|max|min"),
    "variable": Placeholder("`reward`, the reward function's score, or `acc`, which it gives besides", r"reward|acc"),
}


@dataclass(frozen=True)
class StepMetric:
    """One step metric, or a family of them whose keys differ in their placeholders, such as `{engine}`."""

    owner: Owner
    key: str
    unit: Unit
    meaning: str
    """One sentence in Markdown."""
    user_defined: bool = False
    """Whether the names come from a user's own function, so that they exist only in jobs that have one."""

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the variable parts, in their order. Raises KeyError if one is not in `PLACEHOLDERS`."""
        names = tuple(re.findall(r"\{(\w+)\}", self.key))
        return tuple(name for name in names if PLACEHOLDERS[name])

    def covers(self, key: str) -> bool:
        """Whether `key` is this metric or a member of this family."""
        return self._pattern.fullmatch(key) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", self.key)  # text, placeholder, text, placeholder, ..., text
        patterns = [f"({PLACEHOLDERS[part].pattern})" if at % 2 else re.escape(part) for at, part in enumerate(parts)]
        return re.compile("".join(patterns))


by_coordinator = partial(StepMetric, Owner.COORDINATOR)
by_replica = partial(StepMetric, Owner.REPLICA)
by_trainer = partial(StepMetric, Owner.TRAINER)
"""Each declares a step metric that the named service measures."""
