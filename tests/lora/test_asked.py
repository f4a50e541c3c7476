"""Which layers get the adapter that a job asks for."""

from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.lora import AskedAdapter, absent
from millrace.spec.lora import Lora
from tests.lora.folders import LAYERS, Q, write_folder

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
LINEAR = [f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS]
HEAD, OTHERS = ["lm_head"], ["model.embed_tokens", "model.layers.0.mlp.gate"]


def chosen(**options: Any) -> list[str]:
    return AskedAdapter.of(Lora(**options)).choose(LINEAR, HEAD, OTHERS)


def test_names_ends_of_names_and_megatrons_names() -> None:
    assert chosen() == LINEAR
    assert chosen(target_modules=["lm_head", "1.mlp.down_proj"]) == ["model.layers.1.mlp.down_proj", "lm_head"]
    assert chosen(target_modules=["linear_qkv"], exclude_modules=["k_proj"]) == [
        name for name in LINEAR if name.endswith(("q_proj", "v_proj"))
    ]
    without = ["lm_head", "embed_tokens", "gate", "down_proj"]  # names of what never has an adapter do no harm
    assert chosen(exclude_modules=without) == [name for name in LINEAR if "self_attn" in name]


def test_every_name_has_to_mean_a_layer() -> None:
    """Those of Megatron may belong to another model."""
    with pytest.raises(InvalidJob) as refused:
        chosen(target_modules=["q_proj", "v_prj", "linear_kv_up_proj", "gate"], exclude_modules=["dwn_proj"])
    told = {mistake.field + " " + mistake.value: mistake.fix for mistake in refused.value.mistakes}
    targets = "model.lora.target_modules"
    assert told.keys() == {
        'model.lora.exclude_modules "dwn_proj"',
        *(f'{targets} "{name}"' for name in ("v_prj", "gate")),
    }
    assert told[f'{targets} "v_prj"'].startswith("did you mean `v_proj`?")


def test_megatrons_names_of_layers_that_the_model_lacks_are_told() -> None:
    lora = Lora(target_modules=["linear_qkv", "linear_kv_up_proj"], exclude_modules=["linear_fc1", "linear_q_up_proj"])
    assert AskedAdapter.of(lora).choose(LINEAR, HEAD, OTHERS) == [name for name in LINEAR if "self_attn" in name]
    told = [str(each) for each in absent(lora, LINEAR)]
    assert [line.partition(": this")[0] for line in told] == [
        'model.lora.target_modules: "linear_kv_up_proj"',
        'model.lora.exclude_modules: "linear_fc1"',
        'model.lora.exclude_modules: "linear_q_up_proj"',
    ]
    assert "this model has linear_qkv, linear_fc2, linear_q_proj." in told[0]


def test_some_layer_has_to_be_left() -> None:
    with pytest.raises(InvalidJob, match=r"model\.lora\.target_modules: .*: no layer of the model can have an adapter"):
        chosen(target_modules=["linear_kv_up_proj"])
    with pytest.raises(InvalidJob, match=r"model\.lora\.target_modules: .*: exclude_modules leaves none of them"):
        chosen(target_modules=["q_proj"], exclude_modules=["q_proj"])


def test_a_folder_has_its_own_layers(tmp_path: Path) -> None:
    """Names in its configuration may mean nothing, as long as every tensor finds its layer."""
    folder = write_folder(tmp_path, target_modules="all-linear", layers_to_transform=[7])
    assert chosen(adapter_path=str(folder), target_modules=["q_prj"]) == [name for name in LINEAR if name in LAYERS]
    write_folder(tmp_path, {Q: (16, 32), "transformer.h.0.attn.c_attn": (16, 48)})
    with pytest.raises(InvalidJob, match=r"model\.lora\.adapter_path: .*: its transformer\.h\.0\.attn\.c_attn is no"):
        chosen(adapter_path=str(folder))
