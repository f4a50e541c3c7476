"""The catalogue says of each algorithm what its function says, without torch; bad options are refused with the fix."""

import inspect
import subprocess
import sys
import typing

import pytest
import torch

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import INPUTS, AlgorithmKind, find, names
from services.trainer.algorithms.functions import function_of
from services.trainer.algorithms.losses import policy_loss

EVERY = [(kind, name) for kind in AlgorithmKind for name in names(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_entries_are_the_real_signatures(kind, name):
    entry = find(kind, name)
    function = function_of(entry)
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    tensors = {key for key in parameters if hints[key] in (torch.Tensor, torch.Tensor | None)}
    required = {key for key in tensors if parameters[key].default is inspect.Parameter.empty}
    assert (entry.required_inputs, entry.optional_inputs) == (required, tensors - required)
    assert entry.inputs <= INPUTS[kind]
    defaults = {key: parameters[key].default for key in parameters if key not in tensors}
    assert entry.defaults == defaults
    assert entry.check(defaults) == defaults, "a default has to be within its own range"
    assert entry.summary.endswith((".", ":"))
    assert entry.arxiv or kind is AlgorithmKind.CORRECTION, "name the paper: arXiv 0000.00000"


def test_reading_the_catalogue_imports_no_torch():
    code = (
        "import sys; from millrace.rl.registry.catalogue import AlgorithmKind, find, names;"
        "[find(kind, name) for kind in AlgorithmKind for name in names(kind)];"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"clip_hihg": 0.3}, r"algorithm\.policy_loss\.clip_hihg: 0\.3: .*no such option.*did you mean `clip_high`\?"),
        (
            {"clip_low": 1.5},
            r"clip_low: 1\.5: is more than 1\. Fix: give a number that is at most 1\.",
        ),
        ({"clip_low": "0.2"}, r"clip_low: \"0\.2\": is not a number"),
        ({"clip_low": True}, r"clip_low: true: is not a number"),
        ({"clip_high": float("nan")}, r"clip_high: NaN: is not a finite number"),
        ({"dual_clip": 0.5}, r"dual_clip: 0\.5: is not more than 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(InvalidJob, match=complaint):
        find(AlgorithmKind.POLICY_LOSS, "ppo").check(options, "algorithm.policy_loss")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InvalidJob, match=r"algorithm\.advantage: \"grop\": .*did you mean `grpo`\?.*file\.py:function"):
        find(AlgorithmKind.ADVANTAGE, "grop", "algorithm.advantage")


OWN = '''
"""A loss of one's own."""
from torch import Tensor
from millrace.rl.registry.options import Positive

def scaled(*, logprobs_bt: Tensor, advantages_bt: Tensor, scale: Positive = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Scaled policy gradient."""
    return -scale * logprobs_bt * advantages_bt, {"positive": advantages_bt > 0}
'''


def test_a_loss_from_a_users_own_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    name = f"{path}:scaled"
    assert find(AlgorithmKind.POLICY_LOSS, name).summary == "Scaled policy gradient."
    loss, metrics = policy_loss(
        name,
        logprobs_bt=torch.tensor([[-1.0, -2.0]]),
        old_logprobs_bt=torch.tensor([[-1.0, -2.0]]),
        advantages_bt=torch.tensor([[1.0, -1.0]]),
        mask_bt=torch.tensor([[1, 1]]),
        scale=3.0,
    )
    assert loss.item() == pytest.approx((3 - 6) / 2)
    assert metrics["positive"].item() == pytest.approx(0.5)
    with pytest.raises(InvalidJob, match=r"algorithm\.policy_loss\.scale: -1\.0: is less than 1e-12"):
        find(AlgorithmKind.POLICY_LOSS, name).check({"scale": -1.0}, "algorithm.policy_loss")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f(x): ...", "keyword-only"),
        ("def f(*, reward_model_bt: Tensor): ...", "no policy loss is given reward_model_bt"),
        ("def f(*, logprobs_bt: Tensor, a: float): ...", "option 'a' has no default"),
        ("def f(*, logprobs_bt: Tensor, a: dict = None): ...", "type of its option 'a', `dict`, is not one of"),
        ("def f(*, logprobs_bt: Tensor, a: float = g()): ...", "default of its option 'a'"),
        ("def g(): ...", "defines no function 'f'"),
        ("def f(:", "cannot be read"),
    ],
)
def test_users_files_that_cannot_work_are_refused(tmp_path, source, complaint):
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(InvalidJob, match=complaint):
        find(AlgorithmKind.POLICY_LOSS, f"{path}:f")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidJob, match="cannot be read"):
        find(AlgorithmKind.ADVANTAGE, f"{tmp_path}/none.py:f")


def test_corrections_that_only_reject_are_known() -> None:
    rejecting = {
        name for name in names(AlgorithmKind.CORRECTION) if not find(AlgorithmKind.CORRECTION, name).gives_weights
    }
    assert rejecting == {name for name in names(AlgorithmKind.CORRECTION) if name.startswith("reject_")}
    assert not any(find(AlgorithmKind.POLICY_LOSS, name).gives_weights for name in names(AlgorithmKind.POLICY_LOSS))
