"""Which layers of a module get the adapter that a job asks for. Needs no PEFT; the module may have no weights."""

from torch import nn
from transformers import PreTrainedModel

from millrace.lora import AskedAdapter, recurrent_layers
from millrace.spec.lora import Lora, is_router
from services.trainer.backends.fsdp2.published import manifest


def choose_layers(module: PreTrainedModel, lora: Lora) -> list[str]:
    """Names of the layers that get an adapter, in the module's order. Raises InvalidJob for names that no linear layer
    has, and for a folder with adapters of others."""
    tied = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    heads = {name: part for name, part in module.named_modules() if part is module.get_output_embeddings()}
    modules = dict(module.named_modules())
    linear = [name for name, part in modules.items() if type(part) is nn.Linear and not is_router(name)]
    own = [name for name in linear if name in heads and id(heads[name].weight) not in tied]
    others = [*stored_layers(module), *heads]
    without_heads = [name for name in linear if name not in heads]
    return AskedAdapter.of(lora).choose(without_heads, own, others, recurrent_layers(modules))


def stored_layers(module: PreTrainedModel) -> set[str]:
    """Names of everything that has a weight in the model folder."""
    return {tensor.name.removesuffix(".weight") for tensor in manifest(module, "float32").tensors}
