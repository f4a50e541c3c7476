"""Which settings are proposed, and that each saves what it says."""

import pytest

from millrace.memory.ledger import Phase, peak
from millrace.memory.prediction import predict
from millrace.memory.savings import savings, together
from tests.memory.jobs import cut, job

SHAPE = cut("qwen3-8b", 12)


def test_a_saving_is_the_difference_that_the_setting_makes() -> None:
    found = {saving.field: saving for saving in savings(job(), SHAPE, 1)}
    before = peak(predict(job(), SHAPE, 1)).total
    again = peak(predict(job(activation_recompute=True), SHAPE, 1)).total
    recompute = found["trainer.activation_recompute"]
    assert (recompute.bytes, recompute.total) == (before - again, again)
    sizes = [saving.bytes for saving in savings(job(), SHAPE, 1)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 3


def test_what_the_job_has_already_and_what_its_backend_does_not_know_is_not_proposed() -> None:
    fsdp2 = savings(job(options={"offload_parameters": True}, activation_recompute=True), SHAPE, 1)
    fields = {saving.field for saving in fsdp2}
    assert not fields & {"trainer.activation_recompute", "trainer.backend_options.offload_parameters"}
    assert "trainer.backend_options.tensor_parallel" not in fields


@pytest.mark.parametrize(("backend", "size"), [("megatron", "tensor_parallel"), ("fsdp2", "sequence_parallel_size")])
def test_parallelism_is_proposed_only_where_there_are_gpus_for_it(backend: str, size: str) -> None:
    field = f"trainer.backend_options.{size}"
    assert field not in {saving.field for saving in savings(job(backend), SHAPE, 1)}
    assert field in {saving.field for saving in savings(job(backend), SHAPE, 2)}


def test_the_token_budget_is_never_proposed_below_the_longest_sequence() -> None:
    spec = job(rollout={"max_response_tokens": 12_000})
    proposed = {saving.field: saving.value for saving in savings(spec, SHAPE, 1)}
    assert proposed["trainer.token_budget"] == spec.data.max_prompt_tokens + 12_000 > 16384 // 2


@pytest.mark.parametrize("phase", Phase)
def test_a_saving_of_a_phase_is_of_that_phase(phase: Phase) -> None:
    before = predict(job(), SHAPE, 1)[phase].total
    for saving in savings(job(), SHAPE, 1, phase=phase):
        assert saving.bytes == before - saving.total > 0
    fields = {saving.field for saving in savings(job(), SHAPE, 1, phase=phase)}
    assert ("trainer.activation_recompute" in fields) == (phase is Phase.UPDATE)


def test_a_role_s_own_values_are_proposed_where_they_cost_most() -> None:
    """What it has not of its own is the policy's, and proposed there."""
    critic = {"token_budget": 65_536, "activation_recompute": False, "backend_options": {"offload_optimizer": False}}
    algorithm = {"advantage": "gae", "critic": {}}
    spec = job(algorithm=algorithm, critic=critic, activation_recompute=True, options={"offload_optimizer": True})
    found = {saving.field: saving for saving in savings(spec, SHAPE, 1, phase=Phase.UPDATE)}
    recomputed = job(
        algorithm=algorithm,
        critic={**critic, "activation_recompute": True},
        activation_recompute=True,
        options={"offload_optimizer": True},
    )
    again = predict(recomputed, SHAPE, 1)[Phase.UPDATE].total
    assert found["trainer.critic.activation_recompute"].total == again
    assert {"trainer.critic.token_budget", "trainer.critic.backend_options.offload_optimizer"} <= found.keys()
    plain = {saving.field for saving in savings(job(algorithm=algorithm), SHAPE, 1)}
    assert not [field for field in plain if field.startswith("trainer.critic")]


def test_settings_are_put_together_until_the_job_fits() -> None:
    limit = 40e9
    chosen, total = together(job(), cut("qwen3-8b", 36), 1, limit)
    assert len(chosen) >= 2 and total <= limit
    tree = job("fsdp2", {"offload_parameters": True, "offload_activations": True})
    assert total == pytest.approx(peak(predict(tree, cut("qwen3-8b", 36), 1)).total)
