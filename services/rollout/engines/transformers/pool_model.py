"""The Hugging Face model of a pool, with its weights."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from millrace.errors import InvalidJob, refused
from millrace.spec.pool import PoolTask
from services.rollout.engine import PoolModel, compute_threads


def load(model: PoolModel, device: str, attn_implementation: str) -> Any:
    """The model on the device, which is a GPU where there is one and `device` is empty. Raises InvalidJob."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(compute_threads())
    pool, field = model.pool, f"{model.field}.path"
    kind: Any = AutoModelForSequenceClassification if model.task is PoolTask.REWARDS else AutoModelForCausalLM
    try:
        loaded, told = kind.from_pretrained(
            pool.path,
            dtype=getattr(torch, pool.dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=pool.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"{field}: {pool.path} cannot be loaded by transformers: {error}."
        raise InvalidJob(what, "give a Hugging Face model folder of an architecture that it knows.") from error
    if missing := sorted(told["missing_keys"]):
        reason = f"has no weights for {', '.join(missing[:3])}, without which it cannot give {model.task}"
        raise refused(field, pool.path, reason, "give the folder of a trained model of that kind.")
    if model.task is PoolTask.REWARDS and loaded.config.num_labels != 1:
        fix = "give a model with one label, whose number is the reward."
        raise refused(field, pool.path, f"its head has {loaded.config.num_labels} labels", fix)
    return loaded.to(device).eval()


def device_name(model: Any) -> str:
    """The name of the GPU that holds the model, or cpu."""
    device = model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
