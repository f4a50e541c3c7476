"""What a plan says: how its numbers depend on the job and the cluster."""

from dataclasses import replace

import pytest

from millrace.errors import InvalidJob
from millrace.megatron.architectures.published import PUBLISHED, published_as
from millrace.planner.hardware import KINDS
from millrace.planner.plan import Cluster, Limit, make_plan
from millrace.planner.publishing import tensors
from millrace.planner.search import model_shape
from millrace.planner.trainer.layout import Cause, total
from millrace.planner.workload import workload
from tests.memory.jobs import job
from tests.planner.jobs import planned, preset

ON_POLICY = {"max_staleness": 0}
WHOLE = {"streaming": False}


def test_a_step_is_simulated_and_takes_at_least_the_longer_side_at_full_load() -> None:
    """Without staleness both sides take turns, and replicas with a little more work than others are waited for."""
    turns = planned(preset("qwen3-8b-8gpu", schedule=ON_POLICY, trainer=WHOLE))
    overlapped = planned(preset("qwen3-8b-8gpu"))
    assert turns.least_s == pytest.approx(turns.generating_s + turns.training_s)
    assert turns.least_s * 0.99 < turns.step_s < turns.least_s * 1.05
    assert turns.trainer_idle == pytest.approx(1 - turns.training_s / turns.step_s, abs=0.01)
    assert overlapped.least_s == max(overlapped.generating_s, overlapped.training_s) <= overlapped.step_s < turns.step_s
    assert overlapped.generation.total < turns.generation.total  # no tail
    assert turns.simulated is not None and turns.simulated.mean_staleness == 0.0
    streams = planned(preset("qwen3-8b-8gpu", schedule=ON_POLICY))
    assert streams.step_s < 0.95 * turns.step_s
    apart = planned(preset("qwen3-8b-8gpu"), colocated=True)
    assert apart.simulated is None and apart.step_s == apart.least_s


def test_a_job_is_simulated_with_fewer_replicas_than_it_has() -> None:
    """A step of a tenth of the job on a tenth of the replicas takes as long, but for the spread of lengths."""
    large, small = (
        planned(
            preset("qwen3-8b-8gpu", schedule=ON_POLICY | {"prompts_per_step": prompts}, trainer=WHOLE), 80, replicas
        )
        for prompts, replicas in ((640, 80), (64, 8))
    )
    assert large.simulated is not None and len(large.simulated.steps[0].replica_s) < 80
    assert large.generation.total == pytest.approx(small.generation.total, rel=0.02)
    generating = [plan.step_s - plan.training_s for plan in (large, small)]
    assert generating[0] == pytest.approx(generating[1], rel=0.1)


def test_the_balanced_ratio_balances() -> None:
    spec = preset("qwen3-8b-8gpu", rollout={"engine_options": {"max_num_seqs": 64}}, schedule={"prompts_per_step": 48})
    first = planned(spec, 8, 8)
    gpus = round(8 * first.balanced_ratio)
    balanced = planned(spec, 8, gpus)
    assert balanced.generating_s == pytest.approx(balanced.training_s, rel=0.15)
    assert balanced.step_s <= min(first.step_s, planned(spec, 8, max(1, gpus // 2)).step_s)


def test_price_and_tokens_follow_from_the_step() -> None:
    plan = planned(preset("qwen3-8b-8gpu"))
    assert plan.tokens_per_s * plan.step_s == pytest.approx(plan.work.tokens)
    spent = plan.cost_per_million * plan.work.tokens / 1e6
    assert spent == pytest.approx(plan.cluster.gpu.price_per_hour * 16 * plan.step_s / 3600)


def test_what_does_not_fit_is_named() -> None:
    plan = planned(preset("deepseek-v3-96gpu"), 96, 64, "h20")
    assert plan.limits == []
    without = preset("deepseek-v3-96gpu", trainer={"backend_options": {"optimizer_offload_fraction": 0.0}})
    assert Limit.TRAINER_MEMORY in planned(without, 96, 64, "h20").limits
    gpu = plan.cluster.gpu.model_copy(update={"host_memory_gib": 512})
    smaller = replace(plan, cluster=replace(plan.cluster, gpu=gpu))
    assert smaller.limits == [Limit.HOST_MEMORY]


def test_a_pipeline_waits_less_with_more_micro_batches() -> None:
    def waiting(budget: int) -> float:
        update = planned(preset("deepseek-v3-96gpu", trainer={"token_budget": budget}), 96, 64, "h20").training.update
        return update[Cause.PIPELINE] / total(update)

    assert waiting(8192) < waiting(65536)


def test_replicas_in_turns_have_to_fill_the_gpus() -> None:
    spec = preset("qwen3-30b-a3b-8gpu", rollout={"engine_options": {"tensor_parallel_size": 3}})
    with pytest.raises(InvalidJob, match="--trainer-gpus: 8: replicas of 3 GPUs would leave some of them out"):
        planned(spec, 8, 8, "h20", colocated=True)
    with pytest.raises(InvalidJob, match="--rollout-gpus: 2: one replica of this job has 32 GPUs"):
        planned(preset("deepseek-v3-96gpu"), 96, 2, "h20")


def test_steps_of_data_parallel_ranks_are_not_guessed() -> None:
    spec = preset("qwen3-30b-a3b-8gpu", rollout={"engine_options": {"data_parallel_size": 4}})
    with pytest.raises(InvalidJob, match=r"rollout\.engine_options\.data_parallel_size: 4: the steps of several"):
        planned(spec, 8, 8, "h20")


def test_what_leaves_the_gpus_for_replicas_is_in_host_memory() -> None:
    spec = preset("qwen3-30b-a3b-8gpu")
    apart, turns = planned(spec, 8, 8, "h20"), planned(spec, 8, 8, "h20", colocated=True)
    assert turns.host_bytes > apart.host_bytes and turns.turns_s > 0 and turns.publication is None


def test_published_models_are_found_by_their_folder() -> None:
    assert published_as("Qwen3-30B-A3B-Base") == "qwen3-30b-a3b"
    assert published_as("DeepSeek-V3-bf16") == "deepseek-v3"
    assert published_as("my-model") is None
    assert model_shape(job(), "Qwen3-8B") is PUBLISHED["qwen3-8b"]
    with pytest.raises(InvalidJob, match="and no model of this name is known"):
        model_shape(preset("qwen3-8b-8gpu", model={"path": "/data/models/mine"}))


def test_the_tensors_of_published_models_are_counted() -> None:
    counted = {name: tensors(PUBLISHED[name]) for name in ("qwen3-1.7b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3")}
    assert counted == {"qwen3-1.7b": 310, "qwen3-8b": 399, "qwen3-30b-a3b": 18_867, "deepseek-v3": 45_395}


def test_a_version_lets_running_requests_be_read_again_unless_the_cache_is_kept() -> None:
    again, kept = (
        planned(preset("qwen3-8b-8gpu", rollout={"cache_policy": policy})).generation
        for policy in ("recompute", "keep")
    )
    assert again.prefill_s > kept.prefill_s and again.decode_s == kept.decode_s


def test_images_are_seen_by_replicas_and_by_ranks_that_train_an_answer() -> None:
    """By one rank of two each prompt with two answers is seen with 3 in 4; at the first pass over the step."""
    samples = {"samples_per_prompt": 2}
    spec = preset("qwen2.5-vl-7b-lora-8gpu", rollout=samples)
    shape, cluster = model_shape(spec), Cluster(KINDS["h200"], 2, 2)
    plans = [make_plan(spec, shape, cluster, workload(spec, image_tokens=tokens)) for tokens in (400.0, 0.0)]
    seen, without = (plan.training for plan in plans)
    assert shape.tower is not None
    one = shape.tower.flops((1, 40, 40)) / (0.8 * KINDS["h200"].product_rate)
    assert seen.scoring[Cause.TOWER] == pytest.approx(0.75 * spec.schedule.prompts_per_step * one)
    assert Cause.TOWER not in without.scoring and seen.update == without.update and seen.mfu == without.mfu
    assert plans[0].replica.seeing(400.0) == pytest.approx(one)
    read = plans[0].generation.prefill_s - plans[1].generation.prefill_s
    running = plans[0].generation.most_running / 2
    assert read == pytest.approx((spec.schedule.prompts_per_step / 2 + running) * one)
    assert plans[0].step_s > plans[1].step_s
    once = {"old_logprobs": "rollout", "kl": None}
    at_once = preset("qwen2.5-vl-7b-lora-8gpu", algorithm=once, rollout=samples)
    update = make_plan(at_once, shape, cluster, workload(at_once, image_tokens=400.0)).training
    assert not total(update.scoring)
    assert update.update[Cause.TOWER] == seen.scoring[Cause.TOWER] and update.flops > without.flops
    stages = {"backend": "megatron", "backend_options": {"pipeline_parallel": 2}}
    staged = preset("qwen2.5-vl-7b-lora-8gpu", algorithm=once, rollout=samples, trainer=stages)
    of_text, first = (
        make_plan(staged, shape, cluster, workload(staged, image_tokens=tokens)).training for tokens in (0.0, 400.0)
    )
    images = spec.schedule.prompts_per_step * shape.tower.flops((1, 40, 40))
    assert first.flops - of_text.flops == pytest.approx(images)  # of two ranks one has the tower


def test_a_trained_tower_is_computed_in_each_pass_and_published() -> None:
    """Forward and backward are three passes; with one micro-batch an image is seen as often as of a frozen one."""
    trainer = {"token_budget": 10_000_000}
    kinds = [
        preset("qwen2.5-vl-7b-lora-8gpu", model={"lora": None}, trainer={**trainer, "train_tower": trained})
        for trained in (False, True)
    ]
    shape, cluster = model_shape(kinds[0]), Cluster(KINDS["h200"], 8, 8)
    frozen, trained = (make_plan(spec, shape, cluster, workload(spec, image_tokens=400.0)) for spec in kinds)
    assert shape.tower is not None and frozen.publication is not None and trained.publication is not None
    assert trained.publication.bytes - frozen.publication.bytes == 2 * shape.tower.parameters
    looks, once = trained.work.passes.policy + trained.work.passes.reference, frozen.training.scoring[Cause.TOWER]
    assert looks and Cause.TOWER not in frozen.training.update
    assert trained.training.scoring[Cause.TOWER] == pytest.approx(looks * once)
    assert trained.training.update[Cause.TOWER] == pytest.approx(3 * once)
    assert trained.training.flops > frozen.training.flops
    assert trained.training.update[Cause.OPTIMIZER] > frozen.training.update[Cause.OPTIMIZER]
    small = kinds[1].model_copy(update={"trainer": kinds[1].trainer.model_copy(update={"token_budget": 16384})})
    several = make_plan(small, shape, cluster, workload(small, image_tokens=400.0))
    assert several.training.update[Cause.TOWER] > trained.training.update[Cause.TOWER]


@pytest.mark.parametrize("folder", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"])
def test_a_plan_knows_the_adapter_of_a_job_with_images(folder: str) -> None:
    path = f"/data/models/{folder}"
    spec = preset("qwen2.5-vl-7b-lora-8gpu", model={"path": path})
    whole = preset("qwen2.5-vl-7b-lora-8gpu", model={"path": path, "lora": None})
    assert model_shape(spec).tower is not None
    adapter, all_weights = planned(spec), planned(whole)
    assert adapter.publication is not None and all_weights.publication is not None
    assert adapter.publication.bytes < 0.05 * all_weights.publication.bytes
    assert adapter.training.update[Cause.PRODUCTS] < all_weights.training.update[Cause.PRODUCTS]


def test_what_is_in_host_memory_between_uses_travels() -> None:
    def moving(**options: object) -> float:
        on_the_gpu = {"optimizer_offload_fraction": 0.0, "offload_optimizer": False}
        spec = preset("qwen3-30b-a3b-8gpu", trainer={"backend_options": {**on_the_gpu, **options}})
        return planned(spec).training.update.get(Cause.OFFLOAD, 0.0)

    assert moving() == 0.0 < moving(offload_parameters=True) < moving(offload_optimizer=True)


def test_an_engine_that_takes_memory_as_it_needs_it_has_what_the_weights_leave() -> None:
    spec = preset("qwen3-8b-8gpu", rollout={"engine_options": {"max_num_seqs": 64}})
    made = Cluster(KINDS["h200"], 8, 8)
    plan = make_plan(spec, model_shape(spec), made, workload(spec), "transformers")
    assert plan.limits == [] and plan.generation.most_running == 64
    small = Cluster(KINDS["h200"].model_copy(update={"memory_gib": 12}), 8, 8)
    limits = make_plan(spec, model_shape(spec), small, workload(spec), "transformers").limits
    assert Limit.REPLICA_MEMORY in limits


def test_a_critic_takes_time_and_leaves_the_policys_mfu_as_it_is() -> None:
    alone = planned(preset("qwen3-8b-8gpu", algorithm={"kl": None})).training
    beside = planned(preset("qwen3-8b-8gpu", algorithm={"kl": None, "critic": {}, "advantage": "gae"})).training
    assert beside.mfu == pytest.approx(alone.mfu)
    assert total(alone.update) < total(beside.update) < 2 * total(alone.update)
