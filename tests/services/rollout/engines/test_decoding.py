"""The decode loop's parts where a model or a tokenizer gives what none should."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from services.rollout.engine import Sampling, StopReason
from services.rollout.engines.endings import Endings
from services.rollout.engines.transformers.decoding import Request, finished
from services.rollout.engines.transformers.distribution import draw, processed_logprobs


@pytest.mark.parametrize("broken", [[math.nan], [math.inf], [-math.inf] * 8])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9)])
def test_a_row_without_a_distribution_costs_the_others_nothing(broken: list[float], top_k: int, top_p: float) -> None:
    logits_bv = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    temperature_b, top_k_b, top_p_b = (
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.full((4,), top_k),
        torch.full((4,), top_p),
    )
    whole_bv = processed_logprobs(logits_bv, temperature_b, top_k_b, top_p_b)
    expected_b = draw(whole_bv, temperature_b == 0, torch.Generator().manual_seed(2))
    logits_bv[1::2, : len(broken)] = torch.tensor(broken)
    logprobs_bv = processed_logprobs(logits_bv, temperature_b, top_k_b, top_p_b)
    drawn_b = draw(logprobs_bv, temperature_b == 0, torch.Generator().manual_seed(2))
    assert drawn_b.tolist() == [expected_b[0], 0, expected_b[2], 0]
    assert logprobs_bv.gather(1, drawn_b[:, None])[:, 0].isnan().tolist() == [False, True, False, True]
    assert torch.equal(logprobs_bv[::2], whole_bv[::2])


class Bytes:
    """A tokenizer whose tokens are bytes: those that are no character together are each decoded alone."""

    def __init__(self) -> None:
        vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
        self._tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


def test_a_stop_that_only_the_tail_shows_ends_the_answer_whole() -> None:
    request = Request([1], Sampling(100, stop=("\n\n",)), lambda _: None)
    request.tokens = [0xE4, *b" " * 12, *b"\n\n"]
    request.logprobs = [0.0] * len(request.tokens)
    sample = finished(request, Endings(Bytes(), frozenset(), 1000))
    assert sample is not None and sample.stop_reason is StopReason.STOP_STRING
    assert sample.text == Bytes().decode(request.tokens, True) and "\n\n" not in sample.text
