"""Layouts learned from a loader as engines have them: fuses q, k and v, keeps one worker's part, pads the vocabulary,
ties the head, stacks experts, joins two tensors before it copies them, transposes one, flattens another, changes two;
copies to a thread pool or not."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from millrace.errors import InvalidJob
from millrace.weights.loader.learn import learn_layout
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory, pack, pieces_in_messages, unpack
from millrace.weights.plans.sharded import plan
from tests.layouts import whole_layout

HIDDEN, VOCABULARY, PADDED, EXPERTS, FFN = 6, 10, 16, 4, 8
SHAPES = {
    "q": (4 * HIDDEN, HIDDEN),
    "k": (2 * HIDDEN, HIDDEN),
    "v": (2 * HIDDEN, HIDDEN),
    "embed": (VOCABULARY, HIDDEN),
    "turned": (HIDDEN, 3),
    "flat": (3, 4),
    "a": (2, HIDDEN),
    "b": (4, HIDDEN),
    "norm": (HIDDEN,),
    "bias": (HIDDEN,),
    "scale": (),
} | {
    f"{e}.{n}": (FFN, HIDDEN) if n != "down" else (HIDDEN, FFN) for e in range(EXPERTS) for n in ("gate", "up", "down")
}
MANIFEST = Manifest(tuple(TensorInfo(n, s, "bfloat16") for n, s in SHAPES.items()))


class Worker:
    def __init__(self, rank, ranks, threads=False):
        self.threads = threads
        self._a = None

        def zeros(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype)

        self.rank, self.ranks = rank, ranks
        local = EXPERTS // ranks
        self.parameters = {
            "qkv": zeros(8 * HIDDEN // ranks, HIDDEN),
            "embed": zeros(PADDED, HIDDEN),
            "turned": zeros(3, HIDDEN),
            "flat": zeros(12),
            "ab": zeros(6 // ranks, HIDDEN),
            "norm": zeros(HIDDEN),
            "bias": zeros(HIDDEN, dtype=torch.float32),
            "scale": zeros(()),
            "w13": zeros(local, 2 * FFN, HIDDEN),
            "w2": zeros(local, HIDDEN, FFN),
        }
        self.parameters["head"] = self.parameters["embed"]

    def load(self, weights):
        if not self.threads:
            return self._load(weights)
        with ThreadPoolExecutor(1) as pool:
            for name, tensor in weights:
                pool.submit(self._load, [(name, tensor)]).result()

    def _load(self, weights):
        p = self.parameters
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                rows = SHAPES[name][0] // self.ranks
                start = {"q": 0, "k": SHAPES["q"][0], "v": SHAPES["q"][0] + SHAPES["k"][0]}[name] // self.ranks
                p["qkv"].narrow(0, start, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "embed":
                p["embed"][:VOCABULARY].data.copy_(tensor.to("cpu"))
                p["embed"][VOCABULARY:].fill_(0)
            elif name == "turned":
                p["turned"].copy_(tensor.t())
            elif name == "flat":
                p["flat"].copy_(tensor.reshape(-1))
            elif name == "norm":
                p["norm"].copy_(tensor + 1)
            elif name == "a":
                self._a = tensor
            elif name == "b":
                rows = 6 // self.ranks
                p["ab"].copy_(torch.cat([self._a, tensor]).to("cpu").narrow(0, self.rank * rows, rows))
            elif "." in name:
                self._expert(*name.split("."), tensor)
            else:
                p[name].copy_(tensor)

    def _expert(self, expert, name, tensor):
        local = EXPERTS // self.ranks
        index = int(expert) - self.rank * local
        if not 0 <= index < local:
            return
        if name == "down":
            self.parameters["w2"].data[index].copy_(tensor)
        else:
            self.parameters["w13"].data[index].narrow(0, FFN * (name == "up"), FFN).copy_(tensor)


def tensors(seed):
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=random).bfloat16() for n, s in SHAPES.items()}


def put_in_place(load, learned, manifest, given):
    """Puts a version in place as a worker does; the plan by which it was received."""
    held = Memory(manifest, whole_layout(manifest), list(given.values()))
    made = plan(manifest, [held.layout.boxes], [learned.memory.layout.boxes], 256)
    messages = {content: torch.zeros(int(size), dtype=torch.uint8) for content, size in enumerate(made.sizes)}
    for pieces in pieces_in_messages(made, messages, held, every=False).values():
        pack(pieces)
    for pieces in pieces_in_messages(made, messages, learned.memory, every=True).values():
        unpack(pieces)
    for write in learned.constant_writes:
        write()
    load(learned.loader_tensors.items())
    return made


@pytest.mark.parametrize(("rank", "ranks", "threads"), [(0, 1, False), (0, 2, False), (1, 2, False), (1, 2, True)])
def test_what_lands_by_the_plan_is_what_the_loader_would_have_put_there(rank, ranks, threads):
    worker, oracle, given = Worker(rank, ranks, threads), Worker(rank, ranks), tensors(1)
    learned = learn_layout(worker.load, MANIFEST, worker.parameters)
    assert not any(p.any() for p in worker.parameters.values())
    assert set(learned.loader_tensors) == {"norm", "bias"} and learned.loader_bytes == 2 * HIDDEN * 2
    made = put_in_place(worker.load, learned, MANIFEST, given)
    oracle.load(given.items())
    for name, parameter in worker.parameters.items():
        assert torch.equal(parameter, oracle.parameters[name]), name
    # Nothing is sent that this worker has no use for.
    experts = np.array(["." in t.name for t in MANIFEST.tensors])
    assert made.pieces.numel[experts[made.pieces.tensor]].sum() == EXPERTS // ranks * 3 * FFN * HIDDEN


@pytest.mark.parametrize(
    "changed", [lambda joined: joined + 1, lambda joined: joined.t(), lambda joined: joined.narrow(1, 0, 3)]
)
def test_what_is_joined_and_then_changed_goes_through_the_loader(changed):
    manifest = Manifest(tuple(TensorInfo(n, SHAPES[n], "bfloat16") for n in ("a", "b")))
    parameter = changed(torch.zeros(6, HIDDEN, dtype=torch.bfloat16)).clone()

    def load(weights):
        parameter.copy_(changed(torch.cat([tensor for _, tensor in weights])))

    assert set(learn_layout(load, manifest, {"ab": parameter}).loader_tensors) == {"a", "b"}


def test_a_loader_that_does_not_know_a_tensor_refuses_the_job():
    worker = Worker(0, 1)
    strange = Manifest((*MANIFEST.tensors, TensorInfo("other", (3,), "bfloat16")))
    with pytest.raises(InvalidJob, match="loader refused the weights: KeyError: 'other'"):
        learn_layout(worker.load, strange, worker.parameters)


def kept(p, name, tensor):
    p[name].copy_(tensor)


def kept_in_another_form(p, name, tensor):
    p[name].copy_(torch.exp(-tensor.float()).to(p[name].dtype))


def added(p, name, tensor):
    p[name].add_(tensor * 2)


def ignored(p, name, tensor):
    if name == "a":
        kept(p, name, tensor)


def changed_and_dropped(p, name, tensor):
    kept(p, "a", tensor.float() if name == "a" else p["a"] + 0 * len(tensor.float()))


@pytest.mark.parametrize(
    ("write", "untaken"),
    [(kept, ()), (kept_in_another_form, ()), (added, ()), (ignored, (1,)), (changed_and_dropped, (1,))],
)
def test_tensors_of_which_nothing_reaches_a_parameter_are_known(write, untaken):
    parameters = {"a": torch.zeros(4, 3)} | ({"b": torch.zeros(4, 3)} if not untaken else {})
    learned = learn_layout(lambda weights: [write(parameters, *item) for item in weights], two(4, 3), parameters)
    assert learned.untaken == untaken


def test_each_worker_of_several_takes_its_experts():
    learned = [learn_layout(worker.load, MANIFEST, worker.parameters) for worker in (Worker(0, 2), Worker(1, 2))]
    names = [{MANIFEST.tensors[i].name for i in each.untaken} for each in learned]
    assert names == [{f"{e}.{n}" for e in experts for n in ("gate", "up", "down")} for experts in ((2, 3), (0, 1))]


def two(*shape):
    return Manifest(tuple(TensorInfo(n, shape, "float32") for n in ("a", "b")))


def zeroed_first(p, name, tensor):
    p[name].zero_()
    p[name].copy_(tensor)


def zeroed_around(p, name, tensor):
    p[name].zero_()
    p[name][1:3, :2].copy_(tensor[1:3, :2])


def indexed(p, name, tensor):
    p[name][torch.arange(4)] = tensor


def together(p, name, tensor):
    torch._foreach_copy_([p[name][:2], p[name][2:]], [tensor[:2], tensor[2:]])


def into_out(p, name, tensor):
    torch.add(tensor, 1, out=p[name])


def by_value(p, name, tensor):
    p[name].fill_(tensor[0, 0].item())


def beside(p, name, tensor):
    p[name][:, 1:].copy_(tensor[:, 1:])
    p[name][:, :1] = 3
    p[name][:1, 1:].copy_(tensor[:1, 1:])


def constant(p, name, tensor):
    p[name].copy_(tensor if name == "a" else torch.ones(4) * 2)


def derived(p, name, tensor):
    scratch = torch.empty(4, 3)
    scratch.copy_(tensor)
    p[name].copy_(scratch.exp())


def only_zeros(p, name, tensor):
    p[name].copy_(tensor) if name == "a" else p[name].zero_()


WRITERS = [
    (zeroed_first, {"a", "b"}),
    (zeroed_around, {"a", "b"}),
    (indexed, {"a", "b"}),
    (together, {"a", "b"}),
    (into_out, {"a", "b"}),
    (by_value, {"a", "b"}),
    (beside, set()),
    (constant, set()),
    (derived, {"a", "b"}),
    (only_zeros, set()),
]


@pytest.mark.parametrize(("write", "through_the_loader"), WRITERS)
def test_learning_writes_nothing_however_the_loader_writes(write, through_the_loader):
    learned_p, oracle_p = ({n: torch.full((4, 3), 5.0) for n in ("a", "b")} for _ in range(2))
    if write is constant:
        learned_p["b"], oracle_p["b"] = torch.full((4,), 5.0), torch.full((4,), 5.0)
    manifest, given = two(4, 3), {n: torch.randn(4, 3) for n in ("a", "b")}

    def loader(p):
        return lambda weights: [write(p, name, tensor) for name, tensor in weights]

    learned = learn_layout(loader(learned_p), manifest, learned_p)
    assert all((p == 5).all() for p in learned_p.values())
    assert set(learned.loader_tensors) == through_the_loader
    for _ in range(2):
        put_in_place(loader(learned_p), learned, manifest, given)
        loader(oracle_p)(given.items())
        assert all(torch.equal(learned_p[name], oracle_p[name]) for name in learned_p)


def leaves_one_out(p, name, tensor):
    p["a"].copy_(tensor if name == "a" else -tensor.exp())


def writes_a_row_twice(p, name, tensor):
    p["b"].copy_(tensor)
    p["a"][0:3].copy_(tensor[:3])
    p["a"][1:2].copy_(tensor[:1])


def changes_a_part(p, name, tensor):
    p["a"].copy_(tensor)
    p["b"][:3].copy_(tensor[:3] + 1)


def copies_a_parameter(p, name, tensor):
    p["a"].copy_(tensor)
    p["b"].copy_(p["a"] * 2)


@pytest.mark.parametrize(
    ("write", "missing"),
    [(leaves_one_out, "b"), (writes_a_row_twice, "a"), (changes_a_part, "b"), (copies_a_parameter, "b")],
)
def test_a_parameter_that_would_keep_an_unpublished_value_fails_the_publication(write, missing):
    parameters = {n: torch.zeros(4, 3) for n in ("a", "b")}
    with pytest.raises(InvalidJob, match=f"only a part of, {missing}\\."):
        learn_layout(lambda weights: [write(parameters, *item) for item in weights], two(4, 3), parameters)
