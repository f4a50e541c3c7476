"""What one step has to do: how many sequences of which lengths, and which passes, by the job spec.

Lengths of responses are geometric, cut off at the longest that is allowed: every token ends the response with the same
probability. With θ the mean without the cut and c the cut, the mean is θ·(1 − e^(−c/θ)).
"""

import math
from dataclasses import dataclass
from functools import cached_property

from millrace.errors import refused
from millrace.sequence_cost import SequenceCost
from millrace.spec import JobSpec
from millrace.spec.passes import StepPasses, passes_of

RESPONSE_SHARE = 0.25
"""Mean length of a response over the longest allowed one, if the user gives none."""
PROMPT_SHARE = 0.25
"""The same for prompts."""
IMAGE_SHARE = 0.5
"""Tokens of images over those of a whole prompt in a job with images, if the user does not say."""
MOST_LENGTHS = 2048
"""Lengths that stand for all of a step: quantiles of their distribution."""
BISECTIONS = 60
LARGEST_MEAN = 1e9
"""Upper end of the search for θ, tokens."""


@dataclass(frozen=True)
class Workload:
    """One step. Lengths are tokens."""

    prompts: int
    samples: int
    """Responses to each prompt."""
    mean_prompt: float
    mean_response: float
    longest_response: int
    passes: StepPasses
    max_staleness: int
    recomputes_cache: bool = True
    """Whether running requests are read again with each new version (`rollout.cache_policy`)."""
    image_tokens: float = 0.0
    """Tokens of a prompt that are of its image, on average."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Tokens that are trained in a step, those of prompts included."""
        return self.sequences * (self.mean_prompt + self.mean_response)

    @cached_property
    def responses(self) -> list[float]:
        """Lengths of responses: quantiles of the distribution, ascending. All sequences, or MOST_LENGTHS of them."""
        count = min(self.sequences, MOST_LENGTHS)
        theta = _uncut_mean(self.mean_response, self.longest_response)
        if math.isinf(theta):
            return [float(self.longest_response)] * count
        ranks = ((i + 0.5) / count for i in range(count))
        return [min(self.longest_response, -theta * math.log1p(-rank)) for rank in ranks]

    @cached_property
    def mean_pair_length(self) -> float:
        """Σs²/Σs over the lengths s of whole sequences: attention's cost of a token grows with it."""
        lengths = [self.mean_prompt + length for length in self.responses]
        return sum(length * length for length in lengths) / sum(lengths)

    @property
    def mean_held_response(self) -> float:
        """Tokens of its response that a running request has on average: E[s²] / 2·E[s]."""
        return sum(length * length for length in self.responses) / (2 * sum(self.responses))

    def flops(self, cost: SequenceCost) -> float:
        """Model FLOPs of one update on all tokens, forward and backward."""
        lengths = [self.mean_prompt + length for length in self.responses]
        squares = sum(length * length for length in lengths) * self.sequences / len(lengths)
        return cost.per_token * self.tokens + cost.per_token_pair * squares


def _uncut_mean(mean: float, cut: float) -> float:
    """θ of the module's docstring; infinite if the mean is the cut itself."""
    if mean >= cut * (1 - 1e-6):
        return math.inf
    low, high = mean, LARGEST_MEAN
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if middle * -math.expm1(-cut / middle) < mean:
            low = middle
        else:
            high = middle
    return high


def workload(
    spec: JobSpec,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
    image_tokens: float | None = None,
) -> Workload:
    """The work of one step of a job. Raises InvalidJob for a mean length over the longest that the job allows, and for
    images in a job without `data.images`."""
    longest_prompt, longest = spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
    prompt = mean_prompt or max(1.0, PROMPT_SHARE * longest_prompt)
    for field, given, most, of in (
        ("--mean-prompt", mean_prompt, longest_prompt, "the longest that the job allows"),
        ("--mean-response", mean_response, longest, "the longest that the job allows"),
        ("--mean-image-tokens", image_tokens, prompt, "the mean prompt, which has them"),
    ):
        if given is not None and given > most:
            raise refused(field, given, f"is more than {of}, {most:g}", "give a shorter mean.")
    if image_tokens and spec.data.images is None:
        raise refused("--mean-image-tokens", image_tokens, "the job has no data.images", "leave the option out.")
    if image_tokens is None:
        image_tokens = 0.0 if spec.data.images is None else IMAGE_SHARE * prompt
    return Workload(
        prompts=spec.schedule.prompts_per_step,
        samples=spec.rollout.samples_per_prompt,
        mean_prompt=prompt,
        mean_response=mean_response or max(1.0, RESPONSE_SHARE * longest),
        longest_response=longest,
        passes=passes_of(spec, updates=spec.trainer.updates_per_step),
        max_staleness=spec.schedule.max_staleness,
        recomputes_cache=spec.rollout.cache_policy == "recompute",
        image_tokens=image_tokens,
    )
