"""Which layers of a module get the adapter that a job asks for. Needs no PEFT; the module may have no weights."""

from torch import nn
from transformers import PreTrainedModel

from millrace.errors import refused
from millrace.lora.asked import TARGETS, AskedAdapter, ends
from millrace.spec.lora import Lora, is_router
from services.trainer.backends.fsdp2 import recurrent
from services.trainer.backends.fsdp2.published.shards import manifest


def choose_layers(module: PreTrainedModel, lora: Lora) -> list[str]:
    """Names of the layers that get an adapter, in the module's order. Raises InvalidJob for names that no linear layer
    has, and for a folder with adapters of others."""
    tied = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    heads = {name: part for name, part in module.named_modules() if part is module.get_output_embeddings()}
    inner = {id(part) for layer in recurrent.layers(module) for part in layer.modules()}
    named = [(name, part) for name, part in module.named_modules() if type(part) is nn.Linear and not is_router(name)]
    _check_none_recurrent(lora, {end for name, part in named if id(part) in inner for end in ends(name)})
    linear = [name for name, part in named if id(part) not in inner]
    own = [name for name in linear if name in heads and id(heads[name].weight) not in tied]
    others = [*stored_layers(module), *heads]
    return AskedAdapter.of(lora).choose([name for name in linear if name not in heads], own, others)


def _check_none_recurrent(lora: Lora, recurrent_names: set[str]) -> None:
    """Raises InvalidJob where the job names a layer inside a GatedDeltaNet. Engines fuse these layers in another way
    than folders store them, and an adapter on them was not shown to be the same in both."""
    asked = [] if isinstance(lora.target_modules, str) else lora.target_modules
    if named := sorted(recurrent_names.intersection(asked)):
        reason = f"{', '.join(named)} is in a GatedDeltaNet, which has no adapter"
        raise refused(TARGETS, asked, reason, "leave it out; layers of the full attention and the MLP can have one.")


def stored_layers(module: PreTrainedModel) -> set[str]:
    """Names of everything that has a weight in the model folder."""
    return {tensor.name.removesuffix(".weight") for tensor in manifest(module, "float32").tensors}
