"""TRL 1.16 on the peers' work, as its documentation recommends: vLLM's server on one GPU, the trainer on the other.

It needs an environment of its own: MILLRACE_PEERS_TRL names the folders of its PYTHONPATH, if it is not installed in
the interpreter that runs this. Its configurations:

    server   `GRPOTrainer` with `vllm_mode="server"`: generates a batch, trains it, sends its weights
    async    `AsyncGRPOTrainer`, at most one version behind, micro-batches packed by tokens; it downloads its attention
             from the Hugging Face hub

No activation is computed again. `server` pads its micro-batches to their longest answer.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.work import ANSWER_TOKENS, ANSWERS, CONTEXT, LEARNING_RATE, PROMPTS, TOKEN_BUDGET, figures

CASES = ("server", "async")
PORT = 8765
READY_S = 240.0
MICRO_BATCH = 8
"""Answers of a micro-batch of `server`."""
ANSWERS_OF = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""How `async` reads an answer in this tokenizer's chat format (transformers' `response_template`)."""
SHOWN = {"response_length/mean": "completions/mean_length", "response_length/max": "completions/max_length"}


def run_trl(work: Path, case: str, steps: int, limit_s: float, more: Sequence[str] = ()) -> dict[str, Any]:
    """The row of one run of `steps` steps, or of those that came within `limit_s`. `more`: NAME=VALUE of its
    configuration."""
    begun, log = time.monotonic(), work / f"trl-{case}-{time.time_ns()}.log"
    command = [sys.executable, "-m", "benchmarks.peers.trl", str(work), case, str(steps), *more]
    with log.open("wb") as sink:
        server = subprocess.Popen(serving(work), env=environment("1"), stdout=sink, stderr=subprocess.STDOUT)
        trainer = None
        try:
            wait_until_ready(server, min(READY_S, limit_s))
            trainer = subprocess.Popen(command, env=environment("0"), stdout=sink, stderr=subprocess.STDOUT)
            trainer.wait(max(1.0, limit_s - (time.monotonic() - begun)))
        except (RuntimeError, subprocess.TimeoutExpired):
            pass  # what there is counts
        finally:
            for process in (trainer, server):
                end(process)
    rows = [json.loads(line[5:]) for line in log.read_text(errors="replace").splitlines() if line.startswith("STEP ")]
    if len(rows) < 3:
        return {"system": "trl", "case": case, "failure": log.read_text(errors="replace")[-4000:]}
    began_s = time.time() - (time.monotonic() - begun)
    seen = {step: (each["time_s"] - began_s, each) for step, each in enumerate(rows, 1)}
    return {"system": "trl", "case": case, **figures(seen, tuple(SHOWN))}


def serving(work: Path) -> list[str]:
    """The command of vLLM's server, with the flags that TRL's documentation gives it."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(work / "model")),
        *("--host", "127.0.0.1", "--port", str(PORT), "--gpu-memory-utilization", "0.8"),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", "512", "--dtype", "bfloat16"),
        *("--weight-transfer-config", json.dumps({"backend": "nccl"})),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    ]


def environment(gpu: str) -> dict[str, str]:
    """Without what belongs to this project: its plugin of vLLM must not be in a peer's engine."""
    folders = [os.environ.get("MILLRACE_PEERS_TRL", ""), str(Path(__file__).parents[2])]
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "CUDA_VISIBLE_DEVICES": gpu,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def wait_until_ready(server: "subprocess.Popen[bytes]", limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError("the server ended")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready after {limit_s} s")


def end(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20.0)


def spread(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of `work.REWARD`."""
    texts = [each if isinstance(each, str) else each[0]["content"] or "" for each in completions]
    return [(sum(text.encode()) % 101) / 100 for text in texts]


def train(work: Path, case: str, steps: int, more: Sequence[str]) -> None:
    """The trainer's process: prints a line `STEP {…}` after each update."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    class Told(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            # A progress bar may end without a new line before what is printed here.
            found = {name: float(logs[theirs]) for name, theirs in SHOWN.items() if theirs in (logs or {})}
            if not found:
                print("LOG", json.dumps(logs), flush=True)
                return
            print("\nSTEP", json.dumps({"time_s": time.time(), **found}), flush=True)

    common: dict[str, Any] = {
        "output_dir": str(work / f"trl-output-{time.time_ns()}"),
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": PROMPTS * ANSWERS // MICRO_BATCH,
        "num_generations": ANSWERS,
        "max_completion_length": ANSWER_TOKENS,
        "vllm_server_base_url": f"http://127.0.0.1:{PORT}",
        "gradient_checkpointing": False,
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        **{name: json.loads(value) for name, _, value in (each.partition("=") for each in more)},
    }
    tokenizer = AutoTokenizer.from_pretrained(work / "model", padding_side="left")
    tokenizer.response_template = ANSWERS_OF
    given: dict[str, Any] = {
        "model": str(work / "model"),
        "reward_funcs": spread,
        "train_dataset": load_dataset("parquet", data_files=str(work / "train.parquet"), split="train"),
        "processing_class": tokenizer,
        "callbacks": [Told()],
    }
    if case == "server":
        from trl import GRPOConfig, GRPOTrainer

        common["model_init_kwargs"] = common.get("model_init_kwargs") or {
            "attn_implementation": "flash_attention_2",
            "dtype": "float32",
        }
        GRPOTrainer(args=GRPOConfig(use_vllm=True, vllm_mode="server", **common), **given).train()
    else:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        AsyncGRPOTrainer(args=AsyncGRPOConfig(max_staleness=1, token_budget=TOKEN_BUDGET, **common), **given).train()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
