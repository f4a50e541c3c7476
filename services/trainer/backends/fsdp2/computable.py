"""Which architectures this backend computes correctly.

Packed sequences must have the same results as each sequence alone, and training the same as the engine. Any other
architecture would be trained as a different model, without an error. What is known of it by name is refused by name;
for everything else a tiny model of the same architecture is computed in both ways (`proof`)."""

from typing import Any

from transformers import PreTrainedModel

from millrace.backends.fsdp2 import Fsdp2Options
from millrace.errors import InvalidJob, refused
from millrace.fsdp2 import architectures, rotary, sequence_parallel
from millrace.sequence_cost import LINEAR
from millrace.spec import JobSpec
from services.trainer.backends.fsdp2 import attention, recurrent
from services.trainer.backends.fsdp2.proof.packed import Proof, prove

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
ANOTHER = "choose another architecture."


def named(implementation: str) -> str:
    """Name of an attention implementation in trainer.backend_options."""
    return next((name for name, own in attention.OWN.items() if own == implementation), implementation)


def check_config(spec: JobSpec, options: Fsdp2Options, config: Any, path: str, field: str) -> None:
    """Raises InvalidJob for a model with this config that `field` names, if the job cannot train it whatever its
    weights and layers are, or ranks cannot share its micro-batches as the options say."""
    text = config.get_text_config()
    entries = (*sequence_parallel.CONFIG_ENTRIES, *rotary.CONFIG_ENTRIES, *architectures.CONFIG_ENTRIES)
    stated = {name: getattr(text, name, None) for name in entries}
    sequence_parallel.check(options, stated)
    broken = [*architectures.mistakes_of(stated, field, path), *rotary.mistakes_of(spec, stated, field, path)]
    if broken:
        raise InvalidJob.of(broken)


def check_computable(module: PreTrainedModel, implementation: str, path: str, field: str) -> None:
    """Raises InvalidJob if `module`, built from the folder `path`, would be computed as a different model with this
    attention `implementation`. The error names `field` of the job spec."""
    kind, config = type(module), module.config
    kinds = {type(part) for part in module.modules() if isinstance(part, PreTrainedModel)}
    apart = {LINEAR} if recurrent.layers(module) else set()
    layers = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS - apart)
    if layers:
        reason = f"packed sequences come out wrong in its layers of {', '.join(layers)}"
        raise refused(field, path, reason, ANOTHER)
    if any(kind._is_stateful for kind in kinds) and not apart:
        reason = f"the state of {kind.__name__}'s layers would run from one packed sequence into the next"
        raise refused(field, path, reason, ANOTHER)
    if implementation == attention.FLASH2 and not _takes_flash(kind):
        raise refused(field, path, f"{kind.__name__} cannot be computed with {attention.FLASH2}", ANOTHER)
    proof = prove(kind, config, implementation)
    if not proof.holds:
        raise refused(field, path, _refusal(kind, implementation, proof), _fix(kind, config))


def _takes_flash(kind: type[PreTrainedModel]) -> bool:
    """Whether transformers computes models of this class with flash-attn 2."""
    only = getattr(kind, "_compatible_flash_implementations", None)
    return bool(kind._supports_flash_attn) and (only is None or attention.FLASH2 in only)


def _fix(kind: type[PreTrainedModel], config: Any) -> str:
    """The attention implementations that compute the model, of those that know of packed sequences by themselves."""
    known = [*([attention.FLASH2] if _takes_flash(kind) else []), "sdpa"]
    better = " or ".join(f'"{name}"' for name in known if prove(kind, config, name).holds)
    return f"set trainer.backend_options.attention to {better}, or {ANOTHER}" if better else ANOTHER


def _refusal(kind: type[PreTrainedModel], implementation: str, proof: Proof) -> str:
    """What is wrong, in words."""
    what = f"a tiny {kind.__name__} of this config"
    if proof.failure:
        return f"{what} cannot be computed packed, with {named(implementation)} attention: {proof.failure}"
    by = f"{proof.nats:.2g} nats" if proof.nats > proof.tolerance else f"{proof.gradient:.2g} of its gradients"
    without = f", which leaves out its {', '.join(proof.left_out)}" if proof.left_out else ""
    packed = f"packed, with {named(implementation)} attention{without}"
    return f"{what} {packed}, differs by {by} from each sequence alone in transformers"
