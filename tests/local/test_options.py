import sys
from pathlib import Path

import pytest

from millrace.cli.stack import coordinator_ports
from millrace.errors import InvalidState
from millrace.local.options import StackOptions, pythons, services, share_out


def test_options_survive_the_way_to_the_supervisor() -> None:
    options = StackOptions("/somewhere", replicas=2, environment={"A": "b"})
    assert StackOptions.from_json(options.to_json()) == options


def test_services_in_starting_order_with_their_options() -> None:
    made = services(StackOptions("/somewhere", replicas=2, ranks=3, engine="transformers", grpc_port=7601))
    assert [s.name for s in made] == ["coordinator", "trainer", "rollout-0", "rollout-1"]
    assert [s.vital for s in made] == [True, True, False, False]
    assert StackOptions("/somewhere", http_host="0.0.0.0").url == "http://127.0.0.1:7700"
    coordinator, trainer, first, _ = (" ".join(s.argv) for s in made)
    assert "services.coordinator --http-port 7700 --grpc-port 7601" in coordinator and "--insecure" not in coordinator
    assert "--insecure" in services(StackOptions("/somewhere", insecure=True))[0].argv
    assert "services.trainer.launch --ranks 3" in trainer and "--coordinator 127.0.0.1:7601" in trainer
    assert "--engine transformers" in first and "--coordinator 127.0.0.1:7601" in first


def test_several_coordinators_share_a_redis_that_comes_before_them_and_members_get_the_addresses_of_all() -> None:
    options = StackOptions("/somewhere", standby_coordinators=[[7701, 7601]], autoscale="1:2")
    assert StackOptions.from_json(options.to_json()) == options
    assert options.url == "http://127.0.0.1:7700,http://127.0.0.1:7701"
    assert options.coordinator == "127.0.0.1:7600,127.0.0.1:7601"
    made = services(options)
    assert [s.name for s in made] == ["redis", "coordinator", "coordinator-1", "trainer", "rollout-0"]
    assert [s.kind for s in made] == ["redis", "coordinator", "coordinator", "trainer", "rollout"]
    _, first, second, *members = made
    assert first.environment == second.environment | {"REDIS_URL": "unix:///somewhere/coordinator/redis/redis.sock"}
    for each, http, grpc in ((first, "7700", "7600"), (second, "7701", "7601")):
        argv = " ".join(each.argv)
        assert f"--http-port {http} --grpc-port {grpc} " in argv and "--autoscale 1:2" in argv
    for member in members:
        assert "--coordinator 127.0.0.1:7600,127.0.0.1:7601" in " ".join(member.argv)
        assert "REDIS_URL" not in member.environment
    elsewhere = services(options, redis_url="redis://10.0.0.1")
    assert [s.name for s in elsewhere] == [s.name for s in made[1:]], "they use the Redis of their environment"
    assert "REDIS_URL" not in elsewhere[0].environment | services(StackOptions("/somewhere"))[0].environment


def test_coordinators_have_the_given_ports_and_the_next_ones_or_free_ones() -> None:
    with pytest.raises(InvalidState, match=r"--grpc-port: 7701: port 7701 would be for gRPC and for REST.*2 apart"):
        coordinator_ports(2, 7700, 7701)
    assert coordinator_ports(3, 7700, 7600) == [(7700, 7600), (7701, 7601), (7702, 7602)]
    assert len({port for pair in coordinator_ports(2, 0, 0) for port in pair}) == 4


def test_trainers_that_stand_by_have_devices_of_their_own() -> None:
    options = StackOptions("/somewhere", ranks=2, standby_trainers=1)
    _, first, second, replica = services(options, ["0", "1", "2", "3", "4"])
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in (first, second, replica)] == ["0,1", "2,3", "4"]
    assert (first.name, second.name, first.kind) == ("trainer", "trainer-1", second.kind) and first.argv == second.argv
    assert first.vital and second.vital and not first.standby, "a trainer that stands by is faster than a launcher"
    with pytest.raises(InvalidState, match="4 ranks and 1 replicas need 5 CUDA devices, this host shows 1: 0"):
        services(options, ["0"])


def test_several_engines_are_taken_in_turn() -> None:
    made = services(StackOptions("/somewhere", replicas=3, engine="vllm, sglang"))
    engines = [s.argv[s.argv.index("--engine") + 1] for s in made if s.name.startswith("rollout")]
    assert engines == ["vllm", "sglang", "vllm"]
    with pytest.raises(InvalidState, match=r'--(engine|python): "tgi": there is no such engine'):
        StackOptions("/somewhere", engine="vllm,tgi")


def test_an_engine_may_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.touch()
    options = StackOptions("/somewhere", replicas=2, engine="vllm,sglang", pythons=pythons([f"sglang={other}"]))
    assert [s.argv[0] for s in services(options)][1:] == [sys.executable, sys.executable, str(other)]
    for wrong in ("sglang", f"sglang={tmp_path / 'nothing'}"):
        with pytest.raises(InvalidState, match=r"names no interpreter.*ENGINE=PATH"):
            pythons([wrong])
    with pytest.raises(InvalidState, match=r'--(engine|python): "tgi": there is no such engine'):
        StackOptions("/somewhere", pythons={"tgi": str(other)})


def test_each_rank_and_each_replica_gets_a_device_of_its_own() -> None:
    assert share_out(["4", "5", "6", "7"], [2, 1, 1]) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]


def test_a_replica_gets_as_many_as_its_engine_is_spread_over() -> None:
    shared = share_out(["0", "1", "2", "3", "4"], [1, 2, 2])
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in shared] == ["0", "1,2", "3,4"]


def test_on_the_cpu_nothing_is_shared_out() -> None:
    assert share_out([], [2, 1, 1]) == [{}, {}, {}]


def test_too_few_devices_are_told_with_the_arithmetic() -> None:
    with pytest.raises(InvalidState, match="2 ranks and 1 replicas need 3 CUDA devices, this host shows 2: 0, 1"):
        share_out(["0", "1"], [2, 1])


def test_those_that_share_devices_seem_to_be_on_hosts_of_their_own() -> None:
    assert share_out(["3"], [1, 1, 1], shared=True) == [
        {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": f"millrace-{number}"} for number in range(3)
    ]
    found = share_out(["0", "1", "2"], [2, 2], shared=True)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == ["0,1", "2,0"]
    assert share_out(["0", "1"], [1, 1], shared=True) == share_out(["0", "1"], [1, 1])
    with pytest.raises(InvalidState, match="2 ranks and 1 replicas need 3 CUDA devices, this host shows 1"):
        share_out(["0"], [2, 1], shared=True)
