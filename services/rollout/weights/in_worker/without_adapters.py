"""A model as it was before its engine wrapped layers to add an adapter to their output.

Loaders of models know the names of the parameters without the wrappers: `qkv_proj.weight`, and not
`qkv_proj.base_layer.weight`. The engine's own module must not be changed for a loader that runs during generation.
"""

import copy
from typing import Any


def without_adapters(module: Any, wrapper: type[Any]) -> Any:
    """`module` with every layer of type `wrapper` replaced by the `base_layer` in it. Modules that hold such a layer
    are copied; parameters and all other modules are those of `module` itself."""
    if isinstance(module, wrapper):
        return without_adapters(module._modules["base_layer"], wrapper)
    inner = {name: without_adapters(child, wrapper) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in inner.items()):
        return module
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {**module._modules, **inner}
    return copied
