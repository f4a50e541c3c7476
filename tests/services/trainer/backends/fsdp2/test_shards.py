"""The shards that the ranks hold: together they are the whole tensors that are exported."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from millrace.spec.lora import Lora
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Content
from millrace.weights.plans.memory import Memory, pieces_in_messages, unpack
from millrace.weights.plans.sharded import plan
from millrace.weights.transfer.round_operations import round_operations
from services.trainer.backends import build
from services.trainer.protocol.adapter import Published
from services.trainer.protocol.backend import published
from services.trainer.ranks import collectives
from tests.forked import CONTEXT
from tests.layouts import packed_by, whole_layout
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.on_ranks import job_spec

KINDS = ("qwen2", "qwen3_moe", "mixtral")


def check(folder: Path, backend: str = "fsdp2", dtype: str = "bfloat16", **options: object) -> None:
    """Runs on every rank. The default process group carries the messages of a plan."""
    model = build(job_spec({"model": str(folder), "backend": backend, "options": options}), torch.device("cpu"))
    check_published(model, dtype)


def check_published(source: Published, dtype: str, *, ulps: int = 0) -> None:
    """The shards of all ranks together are what is exported, to so many units in the last place. A collective."""
    memory = source.shards(dtype)
    exported = dict(source.export(dtype))
    assert memory is not None and memory.manifest.hash == source.manifest(dtype).hash
    manifest, target = memory.manifest, whole_layout(memory.manifest)
    everyone = [Boxes.decode(data) for data in collectives.gather_bytes(memory.layout.boxes.encode())]
    made = plan(manifest, everyone, [target.boxes], 4096)
    landed = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors]
    mine = packed_by(made, dist.get_rank())
    messages = b""
    for content in mine:
        message = torch.zeros(int(made.sizes[content]), dtype=torch.uint8, device=memory.device)
        (pieces,) = pieces_in_messages(made, {int(content): message}, memory, every=False).values()
        round_operations(pieces, {int(content): message}, memory.device).pack()
        messages += message.cpu().numpy().tobytes()
    for rank, data in enumerate(collectives.gather_bytes(messages)):
        at = 0
        for content in packed_by(made, rank):
            size = int(made.sizes[content])
            message = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8)
            received = Memory(manifest, target, landed)
            (pieces,) = pieces_in_messages(made, {int(content): message}, received, every=True).values()
            unpack(pieces)
            at += size
    if dist.get_rank() == 0:
        by_name = {info.name: tensor for info, tensor in exported.items()}
        for info, tensor in zip(manifest.tensors, landed, strict=True):
            unit = torch.finfo(tensor.dtype).eps
            torch.testing.assert_close(tensor, by_name[info.name].cpu(), rtol=ulps * unit, atol=ulps * unit * 1e-2)


def check_adapter(folder: Path, targets: list[str] | None = None) -> None:
    """The model without its adapter, the adapter alone, and both merged, before and after its values changed. A
    collective."""
    spec = job_spec({"model": str(folder), "backend": "fsdp2", "options": {}})
    lora = Lora(rank=3, alpha=6.0, target_modules=targets or "all-linear", merge=False)
    model = build(spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})}), torch.device("cpu"))
    with torch.no_grad():
        for round_ in range(2):
            for tensor in model.state().values():
                tensor.add_(0.25 + round_)
            for content in (Content.BASE, Content.ADAPTER, Content.MODEL):
                check_published(published(model, content), ("bfloat16", "float32")[round_])


def check_merged(folder: Path, **lora: object) -> None:
    """Whole weights with the adapter merged, of a model whose adapter changes them. A collective."""
    spec = job_spec({"model": str(folder), "backend": "fsdp2", "options": {}, "lora": {"merge": True, **lora}})
    model = build(spec, torch.device("cpu"))
    before = {info.name: tensor for info, tensor in model.export("bfloat16")}
    with torch.no_grad():
        for tensor in model.state().values():
            tensor.add_(0.25)
        check_published(model, "bfloat16")
    name = "model.layers.0.self_attn.q_proj.weight"
    after = {info.name: tensor for info, tensor in model.export("bfloat16")}[name]
    assert (dist.get_rank() == 0) == (after is not None and not torch.equal(after, before[name]))


def on_rank(rank: int, store: str, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for folder in folders[:2]:
        check(folder)
    check_adapter(folders[0])
    check_merged(folders[1], rank=3, dora=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny.save(kind, root / kind)
    return [root / kind for kind in KINDS]


def test_one_rank(one_rank: torch.device, folders: list[Path]) -> None:
    for folder in folders:
        check(folder)
    check_adapter(folders[0])
    check_adapter(folders[1], ["q_proj", "o_proj"])
    check_merged(folders[0], rank=3)


@pytest.mark.parametrize("lora", [None, {"rank": 3, "merge": False}], ids=["whole", "base"])
def test_shards_in_host_memory_are_sent_from_the_device(
    one_rank: torch.device, folders: list[Path], lora: dict[str, object] | None
) -> None:
    """Only the device's name is used here; `tests/gpu/test_offloaded_publication.py` packs them there."""
    on = torch.device("cuda", 0)
    asked = {"model": str(folders[0]), "backend": "fsdp2", "options": {"offload_parameters": True}, "lora": lora}
    model = build(job_spec({name: value for name, value in asked.items() if value is not None}), one_rank)
    model.device = on
    for part in (model, *(model.adapter.parts.values() if model.adapter is not None else ())):
        if hasattr(part, "_device"):
            part._device = on
    memory = published(model, Content.MODEL if lora is None else Content.BASE).shards("bfloat16")
    assert memory is not None and memory.device == on
    assert {buffer.device.type for buffer in memory.buffers} == {"cpu"}


@pytest.mark.slow
def test_two_ranks(folders: list[Path], tmp_path: Path) -> None:
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, str(tmp_path / "store"), folders)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
