"""A user's own algorithm that fails or returns something else is told with file and line."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import AlgorithmKind
from services.trainer.algorithms.corrections import correct
from services.trainer.algorithms.functions import advantage, load_algorithms
from services.trainer.algorithms.losses import policy_loss, selected_tokens

LOSS = "def mine(*, logprobs_bt: Tensor, advantages_bt: Tensor, selected_bt: Tensor = None):\n    "
ADVANTAGE = "def mine(*, token_rewards_bt: Tensor, mask_bt: Tensor):\n    "
CORRECTION = "def mine(*, train_logprobs_bt: Tensor, mask_bt: Tensor):\n    "


def own(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(f"import torch\nfrom torch import Tensor\n\n{text}\n")
    load_algorithms([])
    return f"{folder / 'own.py'}:mine"


def used(kind: AlgorithmKind, name: str) -> Any:
    mask_bt = torch.ones(2, 3, dtype=torch.bool)
    values_bt = -torch.rand(2, 3)
    if kind is AlgorithmKind.ADVANTAGE:
        return advantage(name, token_rewards_bt=values_bt, mask_bt=mask_bt, group_b=torch.zeros(2))
    if kind is AlgorithmKind.CORRECTION:
        return correct([(name, {})], train_logprobs_bt=values_bt, rollout_logprobs_bt=values_bt, mask_bt=mask_bt)
    logprobs_bt = values_bt.clone().requires_grad_()
    tensors = {"old_logprobs_bt": values_bt, "advantages_bt": values_bt, "mask_bt": mask_bt}
    return policy_loss(name, logprobs_bt=logprobs_bt, **tensors)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (AlgorithmKind.POLICY_LOSS, LOSS + "return logprobs_bt @ 5, {}", r"own\.py:5: TypeError"),
        (
            AlgorithmKind.POLICY_LOSS,
            LOSS + "helper()\n\ndef helper():\n    1 / 0",
            r"own\.py:8: ZeroDivisionError: division",
        ),
        (
            AlgorithmKind.POLICY_LOSS,
            LOSS + "torch.ones(2) + torch.ones(3)",
            r"own\.py:5: RuntimeError: The size of tensor a",
        ),
        (AlgorithmKind.POLICY_LOSS, "import no_such_module\n" + LOSS + "...", r"own\.py:4: ModuleNotFoundError"),
        (AlgorithmKind.ADVANTAGE, ADVANTAGE + "raise KeyError('x')", r"own\.py:5: KeyError: 'x'"),
        (AlgorithmKind.CORRECTION, CORRECTION + "raise ValueError", r"own\.py:5: ValueError"),
        (AlgorithmKind.POLICY_LOSS, LOSS + "return -logprobs_bt", r"it gave float32 \[2, 3\] with gradient"),
        (
            AlgorithmKind.POLICY_LOSS,
            LOSS + "return -logprobs_bt.mean(), {}",
            r"with a batch of \[2, 3\] it gave \(float32 \[\]",
        ),
        (AlgorithmKind.POLICY_LOSS, LOSS + "return -logprobs_bt.detach(), {}", r"\(float32 \[2, 3\], \{\}\)"),
        (AlgorithmKind.POLICY_LOSS, LOSS + "return -logprobs_bt, {'a': 1.0}", r"\{a: float\}"),
        (AlgorithmKind.POLICY_LOSS, LOSS + "pass", "it gave NoneType"),
        (
            AlgorithmKind.ADVANTAGE,
            ADVANTAGE + "return token_rewards_bt.sum(-1), token_rewards_bt",
            r"\(float64 \[2\], float64",
        ),
        (AlgorithmKind.ADVANTAGE, ADVANTAGE + "return token_rewards_bt", r"float64 \[2, 3\]"),
        (
            AlgorithmKind.CORRECTION,
            CORRECTION + "return None, train_logprobs_bt, {}",
            r"\(NoneType, float32 \[2, 3\], \{\}\)",
        ),
    ],
)
def test_what_fails_names_its_place(kind: AlgorithmKind, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=words) as raised:
        used(kind, own(tmp_path, text))
    assert f"algorithm.{kind.singular.replace(' ', '_')}.name" in raised.value.what and raised.value.fix


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AlgorithmKind.POLICY_LOSS, LOSS + "return -logprobs_bt, {'all': torch.tensor(1.0), 'low': logprobs_bt < -1}"),
        (AlgorithmKind.POLICY_LOSS, LOSS + "return -logprobs_bt.mean(-1, keepdim=True), {}"),
        (AlgorithmKind.ADVANTAGE, ADVANTAGE + "return token_rewards_bt, token_rewards_bt"),
        (AlgorithmKind.CORRECTION, CORRECTION + "return None, mask_bt, {}"),
    ],
)
def test_what_is_right_is_used(kind: AlgorithmKind, text: str, tmp_path: Path) -> None:
    used(kind, own(tmp_path, text))


def test_so_does_its_choice_of_tokens(tmp_path: Path) -> None:
    name = own(
        tmp_path, LOSS + "return -logprobs_bt, {}\n\ndef select(*, logprobs_bt, advantages_bt, mask_bt):\n    1 / 0"
    )
    values_bt = torch.zeros(2, 3)
    with pytest.raises(InvalidJob, match=r"own\.py:8: ZeroDivisionError"):
        selected_tokens(name, logprobs_bt=values_bt, advantages_bt=values_bt, mask_bt=values_bt.bool())


def test_a_changed_file_counts(tmp_path: Path) -> None:
    name = own(tmp_path, LOSS + "return logprobs_bt / unknown, {}")
    with pytest.raises(InvalidJob, match="NameError"):
        used(AlgorithmKind.POLICY_LOSS, name)
    path = Path(name.removesuffix(":mine"))
    path.write_text(re.sub(" / unknown", "", path.read_text()))
    used(AlgorithmKind.POLICY_LOSS, name)


def test_loading_runs_the_file(tmp_path: Path) -> None:
    name = own(tmp_path, LOSS + "return -logprobs_bt, {}\n\n1 / 0")
    with pytest.raises(InvalidJob, match=r"own\.py:7: ZeroDivisionError"):
        load_algorithms([(AlgorithmKind.ADVANTAGE, "grpo"), (AlgorithmKind.POLICY_LOSS, name)])
