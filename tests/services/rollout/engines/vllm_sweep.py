"""Architectures that the fsdp2 backend trains, in vLLM: `python -m tests.services.rollout.engines.vllm_sweep FOLDER
[MODEL_TYPE ...]` prints one JSON object for each.

A tiny random model of the architecture is published to an engine by the trainer's names of tensors, by shards and
whole. Its log-probabilities of short and long texts beside each other are compared with those of each text alone in
transformers.
"""

import json
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.weights.loader.misfits import tensors_untaken
from services.trainer.backends.fsdp2.proof.packed import CANNOT_RUN, FIRST_TOKEN, random_model
from services.trainer.backends.fsdp2.proof.tiny import VOCABULARY, tiny
from tests.services.trainer.backends.fsdp2 import sweep

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.services.trainer.backends.megatron.on_vllm"])
LONGEST_S = 120.0
MEMORY_BYTES = 12 << 30
"""Of each process: the layout of JetMoe takes all that there is."""
LENGTHS = (5, 37, 13, 130, 9, 64)
"""Tokens of each text. The windows of the tiny models have 8."""

OPTIONS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "ctrl": {"n_positions": 1024},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "dots1": {**sweep.OPTIONS["dots1"], "hidden_size": 4096},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
}
"""Entries that published models have and that vLLM reads, where transformers has no default for them."""


@dataclass(frozen=True)
class Found:
    """What vLLM makes of an architecture."""

    model_type: str
    nats: float | None = None
    """Largest difference of a log-probability; None if vLLM did not run the model."""
    differing: tuple[str, ...] = ()
    """Parameters that shards left otherwise than whole tensors did."""
    failure: str = ""
    """Why vLLM did not run it."""


def look(model_type: str, folder: Path) -> Found:
    """Runs the architecture in a process of its own, as vLLM ends its process for some models."""
    folder.mkdir(parents=True)
    process = CONTEXT.Process(target=_answer, args=(model_type, folder))
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
        return Found(model_type, failure=f"it took longer than {LONGEST_S:.0f} s")
    answer = folder / "answer.json"
    if not answer.is_file():
        return Found(model_type, failure=f"its process ended with status {process.exitcode}")
    return Found(model_type, **json.loads(answer.read_text()))


def _answer(model_type: str, folder: Path) -> None:
    from services.rollout.engines.lifeline import own_descendants

    own_descendants()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        told = _compare(model_type, folder / "model")
    except (*CANNOT_RUN, Exception) as error:  # vLLM's own code
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        told = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place})"}
    (folder / "answer.json").write_text(json.dumps(told))


def _compare(model_type: str, folder: Path) -> dict[str, Any]:
    from vllm.model_executor.models import registry

    from services.rollout.engines.vllm import options
    from tests.services.trainer.backends.megatron.on_vllm import Served

    options.unequal = lambda *_, **__: ""  # what replicas refuse is measured too
    registry._run_in_subprocess = lambda function: function()  # another process would import vLLM again
    made = next(made for made in sweep.registry() if made.model_type == model_type)  # type: ignore[attr-defined]
    kind: Any = sweep.AutoModelForCausalLM._model_mapping[made]
    torch.manual_seed(0)
    model = random_model(kind, tiny(made(**OPTIONS.get(model_type, sweep.OPTIONS.get(model_type, {})))), "eager").eval()
    model.save_pretrained(folder)
    texts = [torch.randint(FIRST_TOKEN, VOCABULARY, (length,)).tolist() for length in LENGTHS]
    served = Served(str(folder), "float32")
    tensors = dict(_published(model))
    served.publish_shards({name: (1.5 * tensor + 0.1).to(tensor.dtype) for name, tensor in tensors.items()})
    if untaken := served.publish(tensors).unplaced:  # which a replica refuses
        raise tensors_untaken(untaken)
    oracle = served.held()
    served.publish_shards({name: (1.5 * tensor + 0.1).to(tensor.dtype) for name, tensor in tensors.items()})
    served.publish_shards(tensors)
    differing = [name for name, tensor in served.held().items() if not torch.equal(tensor, oracle[name])]
    return {"nats": _apart(model, served.logprobs(texts)), "differing": differing}


def _published(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names by which the trainer publishes them."""
    from millrace.weights.loader.stored import pieces, stored_tensors

    for name, tensor in stored_tensors(model):
        for piece, each in pieces(model, name, tensor).items():
            yield piece, each.detach().contiguous()


@torch.no_grad()
def _apart(model: Any, answers: list[tuple[list[int], list[float]]]) -> float:
    """The largest difference of a log-probability."""
    for part in model.modules():
        part.do_not_compile = True  # vLLM's Transformers backend has changed the class, and reads this of its objects
    largest = 0.0
    for whole, found in answers:
        tokens = torch.tensor(whole)
        logprobs_tv = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs_tv.gather(1, tokens[1:, None])[:, 0]
        apart = (expected - torch.tensor(found)).abs().nan_to_num(nan=float("inf"))
        largest = max(largest, float(apart.max()))
    return largest


if __name__ == "__main__":
    for number, model_type in enumerate(sys.argv[2:]):
        print(json.dumps(asdict(look(model_type, Path(sys.argv[1]) / f"{number}-{model_type}"))), flush=True)
