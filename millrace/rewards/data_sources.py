"""Which rule scores the answers to prompts of which data source: the names of verl's `default_compute_score`."""

from enum import StrEnum


class Rule(StrEnum):
    """How an answer is compared with the ground truth."""

    GSM8K = "gsm8k"
    """The number after the last `####`."""
    BOXED = "boxed"
    """The expression in `\\boxed`."""
    DAPO = "dapo"
    """What follows the last `Answer:`; 1 or -1."""
    GEOMETRY = "geometry"
    """The expression in `\\boxed`, and a tenth for reasoning in `<think>`."""
    SEARCH = "search"
    """The text in the last `<answer>`, without case, articles and punctuation."""
    MATH = "math"
    """The expression in `\\boxed`, after words like "the answer is", or anywhere."""
    PROGRAM = "program"
    """The code in the last code block, run against the first test cases."""


SEARCHED = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
PROGRAMS = ("codecontests", "apps", "codeforces", "taco")
RULES = {
    "openai/gsm8k": Rule.GSM8K,
    "lighteval/MATH": Rule.BOXED,
    "DigitalLearningGmbH/MATH-lighteval": Rule.BOXED,
    "HuggingFaceH4/MATH-500": Rule.BOXED,
    "math": Rule.DAPO,
    "math_dapo": Rule.DAPO,
    "math_dapo_reasoning": Rule.DAPO,
    "hiyouga/geometry3k": Rule.GEOMETRY,
    **{f"numina_{name}": Rule.MATH for name in NUMINA},
    **{name: Rule.PROGRAM for name in PROGRAMS},
    **{f"searchR1_{name}": Rule.SEARCH for name in SEARCHED},
}


def rule_of(data_source: str) -> Rule | None:
    """The rule of a data source; None if there is none."""
    return Rule.DAPO if data_source.startswith("aime") else RULES.get(data_source)


def why_none(data_source: str) -> str:
    """Why a data source has no rule."""
    return f"there is no rule for the data source {data_source!r}; there are rules for {', '.join(RULES)} and aime*"
