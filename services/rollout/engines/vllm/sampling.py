"""Requests for samples in vLLM's words, and what ended one in ours."""

from collections.abc import Sequence
from typing import Any

from services.rollout.engine import Sampling, StopReason


def parameters(sampling: Sampling, end_of_turn: Sequence[int]) -> Any:
    """SamplingParams for a sample that any of the tokens `end_of_turn` ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(end_of_turn),
        logprobs=0,
        flat_logprobs=True,
        # Only stop strings need the text token by token.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def is_whole(final: Any) -> bool:
    """Whether the last output of a request is that of a sample that came to its end."""
    return final is not None and final.outputs[0].finish_reason in ("stop", "length")


def stop_reason(output: Any) -> StopReason:
    """What ended a sample."""
    if isinstance(output.stop_reason, str):
        return StopReason.STOP_STRING
    return StopReason.LENGTH if output.finish_reason == "length" else StopReason.END_OF_TURN
