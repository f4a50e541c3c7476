from millrace.contracts.v1 import rollout_pb2
from millrace.sandbox.boundaries import Boundary


def test_the_contract_has_every_boundary() -> None:
    named = {name.removeprefix("BOUNDARY_") for name in rollout_pb2.Boundary.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert named == {boundary.name for boundary in Boundary}
