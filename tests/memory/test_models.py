"""What the policy, the critic and an adapter keep in each phase, and where."""

import pytest

from millrace.memory.adapters import adapter_parameters
from millrace.memory.layers import parameters
from millrace.memory.ledger import Part, Phase
from millrace.memory.prediction import predict
from millrace.spec.lora import Lora
from tests.memory.jobs import cut, job

PPO = {"preset": "ppo"}


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_the_critics_gradients_are_kept_during_the_policys_backward_pass(backend: str) -> None:
    options = {"release_gradients": True} if backend == "megatron" else {}
    found = predict(job(backend, options, algorithm=PPO), cut("qwen3-8b", 12), 1)
    count = parameters(cut("qwen3-8b", 12).as_critic())
    assert Part.GRADIENTS in found[Phase.UPDATE].device  # the peak is in the policy's backward pass
    critic = {phase: found[phase].device[Part.CRITIC] / count for phase in (Phase.SCORING, Phase.UPDATE)}
    assert critic[Phase.UPDATE] - critic[Phase.SCORING] == pytest.approx(4)
    assert critic[Phase.UPDATE] == pytest.approx(16 if backend == "fsdp2" else 18)


def test_the_critics_moments_are_in_host_memory_where_its_own_option_or_the_policys_says_so() -> None:
    shape, on = cut("qwen3-8b", 12), {"offload_optimizer": True}
    moments = 8 * parameters(shape.as_critic())
    plain = predict(job(algorithm=PPO), shape, 1)
    own = predict(job(algorithm=PPO, critic={"backend_options": on}), shape, 1)
    both = predict(job(options=on, algorithm=PPO), shape, 1)
    policys = predict(
        job(options=on, algorithm=PPO, critic={"backend_options": {"offload_optimizer": False}}), shape, 1
    )
    for phase in (Phase.SCORING, Phase.UPDATE, Phase.PUBLICATION):
        assert plain[phase].total - own[phase].total == pytest.approx(moments), phase
        assert policys[phase].total - both[phase].total == pytest.approx(moments), phase
        assert own[phase].host[Part.CRITIC] == sum(own[phase].host.values()) == pytest.approx(moments)
    assert own[Phase.LOAD] == plain[Phase.LOAD]


def test_megatrons_critic_has_its_own_options() -> None:
    """Its optimizer and its weights are in host memory between uses; in an update both models are on the device."""
    shape, on = cut("qwen3-8b", 12), {"offload_optimizer": True, "offload_parameters": True}
    plain = predict(job("megatron", algorithm=PPO), shape, 1)
    own = predict(job("megatron", algorithm=PPO, critic={"backend_options": on}), shape, 1)
    assert own[Phase.UPDATE].device == plain[Phase.UPDATE].device
    for phase in (Phase.LOAD, Phase.PUBLICATION):
        assert own[phase].device[Part.CRITIC] == 0
        assert own[phase].host[Part.CRITIC] == pytest.approx(14 * parameters(shape.as_critic()))
    recomputed = predict(job("megatron", algorithm=PPO, critic={"activation_recompute": True}), shape, 1)
    assert recomputed[Phase.UPDATE] == plain[Phase.UPDATE]  # the policy's pass needs most


def test_moments_of_an_adapter_are_offloaded() -> None:
    shape = cut("qwen3-8b", 12)
    plain, offloaded = (
        predict(job(options={"offload_optimizer": on}, lora={"rank": 32}), shape, 1)[Phase.UPDATE]
        for on in (False, True)
    )
    moments = 8 * adapter_parameters(shape, Lora(rank=32))
    assert plain.total - offloaded.total == pytest.approx(moments) == offloaded.host[Part.ADAPTER]


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_the_reference_has_its_own_logits(backend: str) -> None:
    shape, own = cut("qwen3-8b", 12), {"backend_options": {"logprob_chunk_tokens": 8192}}
    found = [
        predict(job(backend, algorithm={"kl": {"name": "k1"}}, **chunks), shape, 1)[Phase.SCORING].device[Part.LOGITS]
        for chunks in ({}, {"reference": own})
    ]
    assert found[1] == pytest.approx(8 * found[0])
