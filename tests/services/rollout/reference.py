"""Log-probabilities by one plain forward pass over the whole sequence: slow, and independent of any engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, V], float32."""
    with torch.no_grad():
        return model(torch.tensor([list(map(int, tokens))])).logits[0].float()


def logprobs(
    model: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> NDArray[np.float32]:
    """Of each response token, in the distribution after temperature, top-k and top-p; greedy: the model's own."""
    rows = logits(model, [*prompt, *response])[len(prompt) - 1 : -1]
    values = []
    for row, token in zip(rows, response, strict=True):
        if temperature == 0 or (top_k == 0 and top_p == 1.0):
            values.append(float((row / (temperature or 1.0)).log_softmax(-1)[int(token)]))
            continue
        kept = _kept((row / temperature).tolist(), top_k, top_p)
        scaled = torch.tensor([row[i] / temperature if i in kept else -torch.inf for i in range(len(row))])
        values.append(float(scaled.log_softmax(-1)[int(token)]))
    return np.asarray(values, dtype=np.float32)


def _kept(scores: list[float], top_k: int, top_p: float) -> set[int]:
    """Token by token, as the definitions say it."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    order = order[:top_k] if top_k else order
    weights = np.exp(np.asarray([scores[i] for i in order]) - scores[order[0]])
    probabilities, kept, mass = weights / weights.sum(), set(), 0.0
    for i, probability in zip(order, probabilities, strict=True):
        if kept and mass >= top_p:
            break
        kept.add(i)
        mass += probability
    return kept


def greedy_prompt(model: Any, token: int) -> list[int]:
    """A prompt after which `token` is the most likely one, by a clear margin."""
    prompts = torch.randint(0, 256, (8192, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = torch.cat([model(part).logits[:, -1].float() for part in prompts.split(1024)])
    others = rows.clone()
    others[:, token] = -torch.inf
    margins = rows[:, token] - others.max(-1).values
    assert margins.max() > 0.1, "no prompt ends at once with this model"
    return prompts[int(margins.argmax())].tolist()
