"""Asks a gRPC server's health service: `python -m millrace.wire.probe host:port` exits 0 if it serves. Of several
addresses with commas one has to: a coordinator that stands by does not serve. With `--alive` any answer is enough."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.wire.channel import addresses, open_channel
from millrace.wire.deadlines import DEADLINES_S


def serving(address: str) -> tuple[bool, str]:
    """Whether the server at `address` says that it serves; and its answer, or why there is none."""
    with open_channel(grpc, address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINES_S["Health/Check"])
        except grpc.RpcError as error:
            return False, f"{address}: {error.code().name}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return reply.status == health_pb2.HealthCheckResponse.SERVING, f"{address}: {name}"


if __name__ == "__main__":
    alive, address = "--alive" in sys.argv[1:-1], sys.argv[-1]
    answers = [serving(each) for each in addresses(address)]
    print(", ".join(answer for _, answer in answers))
    sys.exit(0 if any(healthy or (alive and "NOT_SERVING" in answer) for healthy, answer in answers) else 1)
