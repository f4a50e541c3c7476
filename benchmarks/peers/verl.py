"""verl 0.9.1 on the peers' work, as its documentation recommends and tuned.

It needs an environment of its own: MILLRACE_PEERS_VERL names the folders of its PYTHONPATH, if it is not installed in
the interpreter that runs this. Its configurations:

    fsdp2, megatron              hybrid (`trainer_mode: sync`): all GPUs generate, then all train
    async-fsdp2, async-megatron  `separate_async`: half of the GPUs train, half generate, one batch ahead

No activation is computed again, the engine's log-probabilities stand for those of the old policy, and the replay buffer
looks every 0.1 s for finished answers instead of every 2 s.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.work import (
    ANSWER_TOKENS,
    ANSWERS,
    CONTEXT,
    LEARNING_RATE,
    PROMPT_TOKENS,
    PROMPTS,
    TOKEN_BUDGET,
    figures,
)

CASES = ("fsdp2", "megatron", "async-fsdp2", "async-megatron")
POLL_S = 0.1
ENDING_S = 10.0
PAIR = re.compile(r"([\w@./-]+):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|nan|inf))\)?(?=\s|$)")
STEP = re.compile(r"step:(\d+) - (.*)")
SHOWN = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "response_length/mean",
    "response_length/max",
    "perf/mfu/actor",
    "perf/max_memory_reserved_gb",
)
BUFFERS = """from verl.trainer.ppo.v1.replay_buffer import {base}


class Quick(base):
    def __init__(self, *args, **named):
        named["poll_interval"] = {poll}
        super().__init__(*args, **named)
""".replace("(base)", "({base})")


def run_verl(work: Path, case: str, steps: int, limit_s: float, gpus: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """The row of one run of `steps` steps, or of those that came within `limit_s`."""
    base = "ReplayBufferAsync" if case.startswith("async-") else "ReplayBuffer"
    (work / "buffer.py").write_text(BUFFERS.format(base=base, poll=POLL_S))
    log = work / f"verl-{case}-{time.time_ns()}.log"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(work, case, steps, gpus), *more]
    begun, seen = time.monotonic(), dict[int, tuple[float, dict[str, float]]]()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment(case), cwd=work, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        family = dict[int, float]()
        try:
            while len(seen) < steps and time.monotonic() - begun < limit_s:
                ended = process.poll() is not None
                remember(process.pid, family)
                for line in log.read_text(errors="replace").splitlines():
                    found = STEP.search(line)
                    if found and "timing_s/step" in line and int(found[1]) not in seen:
                        values = {name: float(value) for name, value in PAIR.findall(found[2])}
                        seen[int(found[1])] = (time.monotonic() - begun, values)
                if ended:
                    break
                time.sleep(0.25)
        finally:
            end(process, family)
    if len(seen) < 3:
        return {"system": "verl", "case": case, "failure": log.read_text(errors="replace")[-4000:]}
    return {"system": "verl", "case": case, **figures(seen, SHOWN)}


def overrides(work: Path, case: str, steps: int, gpus: int) -> list[str]:
    """verl's settings, as its command line takes them."""
    separate, backend = case.startswith("async-"), case.removeprefix("async-")
    trainers = gpus // 2 if separate else gpus
    role = "actor_rollout_ref"
    words = [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "algorithm.rollout_correction.bypass_mode=True",
        f"data.train_files={work}/train.parquet",
        f"data.val_files={work}/train.parquet",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={ANSWER_TOKENS}",
        "data.filter_overlong_prompts=False",
        "data.truncation=error",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        "data.return_raw_chat=True",
        f"{role}.model.path={work}/model",
        f"{role}.model.use_remove_padding=True",
        f"{role}.model.enable_gradient_checkpointing=False",
        f"{role}.actor.optim.lr={LEARNING_RATE}",
        f"{role}.actor.ppo_mini_batch_size={PROMPTS}",
        f"{role}.actor.use_dynamic_bsz=True",
        f"{role}.actor.ppo_max_token_len_per_gpu={TOKEN_BUDGET}",
        f"{role}.actor.use_kl_loss=False",
        f"{role}.actor.entropy_coeff=0",
        f"reward.custom_reward_function.path={work}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[console]",
        "trainer.project_name=peers",
        f"trainer.experiment_name={case}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={trainers}",
        f"trainer.default_local_dir={work}/checkpoints",
        "trainer.use_v1=True",
        "transfer_queue.enable=True",
        f"trainer.v1.sampler.custom_sampler.path={work}/buffer.py",
        "trainer.v1.sampler.custom_sampler.name=Quick",
        f"ray_kwargs.ray_init.num_cpus={max(16, os.cpu_count() or 16)}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=8000000000",
        f"+ray_kwargs.ray_init._temp_dir=/tmp/ray-{os.getpid()}",
    ]
    return [
        *words,
        *rollout_overrides(role),
        *backend_overrides(role, backend),
        *mode_overrides(role, separate, gpus - trainers),
    ]


def rollout_overrides(role: str) -> list[str]:
    return [
        f"{role}.rollout.name=vllm",
        f"{role}.rollout.mode=async",
        f"{role}.rollout.tensor_model_parallel_size=1",
        f"{role}.rollout.n={ANSWERS}",
        f"{role}.rollout.temperature=1.0",
        f"{role}.rollout.max_num_seqs=512",
        f"{role}.rollout.max_model_len={CONTEXT}",
        f"{role}.rollout.max_num_batched_tokens=8192",
        f"{role}.rollout.enable_chunked_prefill=True",
        f"{role}.rollout.enforce_eager=False",
        f"{role}.rollout.calculate_log_probs=True",
        f"{role}.rollout.log_prob_use_dynamic_bsz=True",
        f"{role}.rollout.log_prob_max_token_len_per_gpu={TOKEN_BUDGET}",
    ]


def backend_overrides(role: str, backend: str) -> list[str]:
    if backend == "fsdp2":
        return [
            f"{role}.actor.strategy=fsdp2",
            f"{role}.actor.fsdp_config.param_offload=False",
            f"{role}.actor.fsdp_config.optimizer_offload=False",
            f"{role}.actor.fsdp_config.reshard_after_forward=False",
        ]
    transformer = f"{role}.actor.megatron.override_transformer_config"
    return [
        "model_engine=megatron",
        f"{role}.actor.megatron.use_mbridge=True",
        f"{role}.actor.megatron.vanilla_mbridge=True",
        f"{transformer}.attention_backend=fused",
        f"+{transformer}.apply_rope_fusion=True",
        f"+{transformer}.bias_activation_fusion=True",
        f"+{transformer}.masked_softmax_fusion=True",
        f"+{role}.model.override_config.attn_implementation=sdpa",
    ]


def mode_overrides(role: str, separate: bool, generators: int) -> list[str]:
    if not separate:
        return [
            "trainer.v1.trainer_mode=sync",
            f"{role}.rollout.gpu_memory_utilization=0.6",
            f"{role}.rollout.free_cache_engine=True",
        ]
    return [
        "trainer.v1.trainer_mode=separate_async",
        f"{role}.hybrid_engine=False",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.v1.sampler.max_off_policy_threshold=8",
        f"{role}.rollout.nnodes=1",
        f"{role}.rollout.n_gpus_per_node={generators}",
        f"{role}.rollout.checkpoint_engine.backend=nccl",
        f"{role}.rollout.gpu_memory_utilization=0.8",
    ]


def environment(case: str) -> dict[str, str]:
    """Without what belongs to this project: its plugin of vLLM must not be in a peer's engine."""
    found = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found["PYTHONPATH"] = os.environ.get("MILLRACE_PEERS_VERL", "")
    if case.endswith("megatron"):
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return found | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "TENSORBOARD_DIR": "/tmp/peers-tensorboard",
        "VLLM_DISABLE_COMPILE_CACHE": "0",
        "VERL_LOGGING_LEVEL": "WARN",  # one message of level INFO ends `separate_async` of 0.9.1
    }


def remember(pid: int, family: dict[int, float]) -> None:
    """Adds the processes below `pid` and below those of `family`, with the time at which each began."""
    for parent in [pid, *family]:
        try:
            for child in psutil.Process(parent).children(recursive=True):
                family.setdefault(child.pid, child.create_time())
        except psutil.Error:
            continue


def end(process: subprocess.Popen[bytes], family: dict[int, float]) -> None:
    """Ends what the run began: verl's workers are no children of its driver any more."""
    remember(process.pid, family)
    alive = []
    for pid, began in family.items():
        try:
            if (found := psutil.Process(pid)).create_time() == began:
                alive.append(found)
        except psutil.Error:
            continue
    for each in [psutil.Process(process.pid)] if process.poll() is None else []:
        each.send_signal(signal.SIGTERM)
    for each in alive:
        try:
            each.terminate()
        except psutil.Error:
            continue
    for each in psutil.wait_procs(alive, timeout=ENDING_S)[1]:
        try:
            each.kill()
        except psutil.Error:
            continue
    if process.poll() is None:
        process.kill()
    process.wait(ENDING_S)
