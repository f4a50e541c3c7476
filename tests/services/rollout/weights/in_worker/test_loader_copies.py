"""A loader as engines have them: fuses q, k and v, keeps one worker's half, pads the vocabulary, ties the head."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from millrace.weights.loader.patches import pools_run_inline
from services.rollout.weights.in_worker.gather_broadcast import record_copies

HIDDEN, VOCABULARY, PADDED = 6, 10, 16


def make(rank, tied):
    embed = torch.zeros(PADDED, HIDDEN)
    parameters = {"qkv": torch.zeros(3 * HIDDEN // 2, HIDDEN), "embed": embed, "norm": torch.zeros(HIDDEN)}
    parameters["head"] = embed if tied else torch.zeros(PADDED, HIDDEN)

    def load(weights):
        half = HIDDEN // 2
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                part = tensor.narrow(0, rank * half, half)
                parameters["qkv"].narrow(0, "qkv".index(name) * half, half).copy_(part)
            elif name == "norm":
                parameters["norm"].copy_(tensor + 1)  # changed on the way
            else:
                parameters[name][:VOCABULARY].copy_(tensor)

    return parameters, load


def tensors(tied):
    names = ("q", "k", "v") + (("embed",) if tied else ("embed", "head"))
    shapes = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    return {n: torch.randn(shapes.get(n, (HIDDEN, HIDDEN))) for n in names}


def test_copies_read_back_what_was_loaded_and_name_what_was_changed():
    for rank, tied in [(0, True), (1, True), (0, False), (1, False)]:
        parameters, load = make(rank, tied)
        first = tensors(tied)
        copies = record_copies(load, first, parameters)
        assert copies.unknown == () and copies.mismatches(first) == []
        second = tensors(tied)
        load(iter(second.items()))
        assert copies.mismatches(second) == []
        assert copies.mismatches(first) == sorted(first)
        parameters["qkv"][4, 2] += 1.0  # the k part of this worker
        assert copies.mismatches(second) == ["k"]


def test_read_gives_this_workers_part_in_manifest_terms():
    parameters, load = make(rank=1, tied=False)
    given = tensors(tied=False)
    copies = record_copies(load, given, parameters)
    assert torch.equal(copies.read("head", given["head"]), given["head"])
    k = copies.read("k", given["k"])
    assert torch.equal(k[HIDDEN // 2 :], given["k"][HIDDEN // 2 :]) and k[: HIDDEN // 2].isnan().all()


def test_a_tensor_changed_on_the_way_is_unknown():
    parameters, load = make(rank=0, tied=True)
    copies = record_copies(load, {"norm": torch.randn(HIDDEN)}, parameters)
    assert copies.unknown == ("norm",)


def test_what_is_joined_in_a_thread_of_its_own_is_read_back_from_its_parts():
    fused = torch.zeros(5, HIDDEN)
    given = {"a": torch.randn(2, HIDDEN), "b": torch.randn(4, HIDDEN)}

    def load(weights):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda parts: fused.copy_(torch.cat(parts)[1:]), [tensor for _, tensor in weights]).result()

    copies = record_copies(load, given, {"fused": fused})
    assert copies.unknown == () and copies.mismatches(given) == []
    assert torch.equal(fused, torch.cat(list(given.values()))[1:])
    assert torch.equal(copies.read("b", given["b"]), given["b"])
    fused[0, 0] += 1.0
    assert copies.mismatches(given) == ["a"]


def test_other_threads_pools_are_left_alone():
    with ThreadPoolExecutor(1) as pool, pools_run_inline():
        assert pool.submit(threading.get_ident).result() == threading.get_ident()
        found = []
        other = threading.Thread(target=lambda: found.append(pool.submit(threading.get_ident).result()))
        other.start()
        other.join()
        assert found[0] not in (threading.get_ident(), other.ident)
        failed = pool.submit(lambda: 1 / 0)
        assert isinstance(failed.exception(), ZeroDivisionError)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
