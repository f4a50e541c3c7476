"""What vLLM makes of versions that are published to it, for one model folder after the other in one process: `launch`
starts it.

The engine begins with weights of no meaning, as a replica's does, and gets, through its worker's receiver: a version of
no meaning by shards, the folder's whole, one of no meaning again, the folder's by shards.
"""

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in a replica: a helper of the sampler would be compiled

import numpy as np
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from millrace.weights.plans.boxes import Boxes
from services.rollout.engines.lifeline import own_descendants
from services.rollout.engines.vllm.options import check_model, engine_arguments
from services.rollout.weights.in_worker.model import EngineModel
from services.rollout.weights.in_worker.receiver import WeightReceiver
from services.rollout.weights.worker_methods import Placed
from tests.sender import Sender
from tests.services.rollout.jobs import job_spec
from tests.services.trainer.backends.megatron import batch
from tests.shard_sender import Shards, ShardSender

OPTIONS = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
}
DECODED = 6
Tensors = Mapping[str, torch.Tensor]


def receiver_of(worker: Any) -> WeightReceiver:
    """A receiver for the model of vLLM's worker, which runs in this process."""
    return WeightReceiver(EngineModel(worker.rank, worker.get_model, worker.model_config.dtype))


class Served:
    def __init__(self, model: str, dtype: str) -> None:
        spec = job_spec(Path(model), "vllm", rollout={"engine_options": OPTIONS, "dtype": dtype})
        arguments = vars(engine_arguments(spec))
        arguments.pop("enable_log_requests")
        self.llm = LLM(**arguments)
        check_model(self.llm.llm_engine.vllm_config)
        self.receiver: WeightReceiver
        (self.receiver,) = self.llm.collective_rpc(receiver_of)
        self.version = 0
        self.loaders: list[str] = []
        """Names of tensors that went whole through vLLM's loader."""

    def publish(self, tensors: Tensors) -> Placed:
        self.version += 1
        return self._receive(Sender(tensors, version=self.version))

    def publish_shards(self, tensors: Tensors, *, computed: bool = False) -> None:
        self.version += 1
        shards = Shards(tensors, computed=computed)
        wanted = Boxes.decode(self.receiver.describe(shards.manifest.to_proto().SerializeToString()).boxes)
        self.loaders = list(self._receive(ShardSender(shards, [wanted], version=self.version)).loader_names)

    def _receive(self, sender: Sender | ShardSender) -> Placed:
        """Receives a version into spare memory and puts it in place."""
        assert self.receiver.prepare(sender.request.encode()) is not None
        self.receiver.make_ready(True)
        sender.start()
        self.receiver.begin()
        while self.receiver.wait_received() is None:
            pass
        sender.join()
        return self.receiver.place()

    def held(self) -> dict[str, torch.Tensor]:
        """All that the model computes with."""
        (model,) = self.llm.apply_model(lambda model: {n: t.detach().clone() for n, t in model.named_parameters()})
        return model

    def logprobs(self, sequences: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """The sequences, each with the tokens that are likeliest after it: prefilled and decoded. Nats, at temperature
        1, of each token but the first."""
        wanted = SamplingParams(
            max_tokens=DECODED, temperature=0.0, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in sequences]
        found = []
        for tokens, output in zip(sequences, self.llm.generate(prompts, wanted, use_tqdm=False), strict=True):
            decoded = output.outputs[0]
            told = [*output.prompt_logprobs[1:], *decoded.logprobs]
            whole = [*tokens, *decoded.token_ids]
            found.append((whole, [told[i][token].logprob for i, token in enumerate(whole[1:])]))
        return found


def answer(model: str, dtype: str) -> dict[str, Any]:
    served = Served(model, dtype)
    stored = load_file(Path(model) / "model.safetensors")
    tensors = {name: t.to(t.dtype if "e_score" in name else getattr(torch, dtype)) for name, t in stored.items()}
    nothing = {name: (1.5 * t + 0.1).to(t.dtype) for name, t in tensors.items()}
    served.publish_shards(nothing)
    served.publish(tensors)
    oracle = served.held()
    differing: list[str] = []
    for computed in (False, True):
        served.publish_shards(nothing)
        served.publish_shards(tensors, computed=computed)
        differing += [name for name, tensor in served.held().items() if not torch.equal(tensor, oracle[name])]
    sequences = [np.concatenate([t.prompt, t.response]).tolist() for t in batch.trajectories()]
    told = {"logprobs": served.logprobs(sequences), "differing": differing, "loaders": served.loaders}
    served.llm.llm_engine.engine_core.shutdown()
    return told


def main() -> None:
    own_descendants()
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    answers: dict[str, Any] = {}
    for name, (model, dtype) in cases.items():
        answers[name] = answer(model, dtype)
        gc.collect()
        cleanup_dist_env_and_memory()
    (folder / "answer.json").write_text(json.dumps(answers))
    os._exit(0)


if __name__ == "__main__":
    main()
