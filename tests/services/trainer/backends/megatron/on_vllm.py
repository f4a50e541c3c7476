"""vLLM's log-probabilities of the batch, for one model folder after the other in one process. `launch` starts it."""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import numpy as np
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.services.trainer.backends.megatron import batch


def logprobs(model: str, **options: Any) -> list[list[float]]:
    """Nats, at temperature 1, of each token of each sequence but its first."""
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )
    sequences = [np.concatenate([t.prompt, t.response]).tolist() for t in batch.trajectories()]
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": tokens} for tokens in sequences], wanted, use_tqdm=False)
    found = []
    for tokens, output in zip(sequences, outputs, strict=True):
        told = output.prompt_logprobs[1:]
        found.append([told[i][token].logprob for i, token in enumerate(tokens[1:])])
    engine.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    answers: dict[str, Any] = {}
    for name, (model, options) in cases.items():
        answers[name] = logprobs(model, **options)
        gc.collect()
        cleanup_dist_env_and_memory()
    (folder / "answer.json").write_text(json.dumps(answers))
    os._exit(0)


if __name__ == "__main__":
    main()
