"""Which fields of requests are refused, and with which words."""

import math
from typing import Any

import pytest

from millrace.contracts.field_rules import RULES, check
from millrace.contracts.v1 import fleet_pb2, logs_pb2, nodes_pb2, rollout_pb2, trainer_pb2, weights_pb2, work_pb2
from millrace.errors import InvalidRequest

REF = weights_pb2.PublicationRef(job_id="job-1")
STEP: dict[str, Any] = {
    "groups": [trainer_pb2.GroupRef(prompt_id="0-1", prompt_tokens=3, response_tokens=[2])],
    "work_address": "10.0.0.1:7600",
}


@pytest.mark.parametrize(
    "message",
    [
        trainer_pb2.SaveRequest(job_id="job-1", path="/data/run/checkpoints/step-4"),
        trainer_pb2.StepRequest(job_id="job-1", step=4, **STEP),
        trainer_pb2.PrepareSendRequest(publication=REF, dtype="bfloat16", deadline_s=300.0),
        work_pb2.LeaseRequest(member_id="rollout-1a2b3c4d", free_samples=64, wait_s=10.0),
        fleet_pb2.RegisterRequest(member_id="trainer-1", address="[::1]:7610"),
        fleet_pb2.LeaveRequest(member_id="trainer-1", reason="x" * 100_000),
        rollout_pb2.GenerateRequest(prompt="[]", sampling=work_pb2.Sampling(max_response_tokens=5, top_k=-1)),
    ],
)
def test_what_services_send_is_taken(message: Any) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (trainer_pb2.SaveRequest(job_id="job-1"), 'path: "": is missing'),
        (trainer_pb2.SaveRequest(path="run"), 'path: "run": is not the absolute path of a folder'),
        (trainer_pb2.SaveRequest(path="/"), "path: "),
        (trainer_pb2.SaveRequest(path="/data/../etc"), "path: "),
        (trainer_pb2.SaveRequest(path="/data/\0"), "path: "),
        (trainer_pb2.LoadRequest(), "path: "),
        (trainer_pb2.ConfigureTrainerRequest(checkpoint="step-4"), "checkpoint: "),
        (trainer_pb2.StepRequest(work_address="10.0.0.1:7600"), "groups: "),
        (
            trainer_pb2.StepRequest(groups=STEP["groups"], work_address="nowhere"),
            'work_address: "nowhere": is not host:port',
        ),
        (
            trainer_pb2.StepRequest(
                groups=[trainer_pb2.GroupRef(prompt_id="0-1", prompt_tokens=1)], work_address="x:1"
            ),
            "response_tokens: ",
        ),
        (trainer_pb2.PrepareSendRequest(publication=REF, dtype="int8", deadline_s=1.0), 'dtype: "int8"'),
        (trainer_pb2.PrepareSendRequest(publication=REF, dtype="float32", deadline_s=math.nan), "deadline_s: "),
        (trainer_pb2.PrepareSendRequest(dtype="float32", deadline_s=1.0), "publication: "),
        (work_pb2.LeaseRequest(member_id="rollout-1", wait_s=math.inf), "wait_s: "),
        (work_pb2.LeaseRequest(member_id="rollout-1", wait_s=-1.0), "wait_s: "),
        (work_pb2.FetchRequest(job_id="job-1:train"), 'job_id: "job-1:train": is no id'),
        (work_pb2.ExtendRequest(leases=[work_pb2.LeaseRef(job_id="job-1")]), "lease_id: "),
        (fleet_pb2.RegisterRequest(member_id="rollout-1", address="host:99999"), "address: "),
        (fleet_pb2.RegisterRequest(member_id="x" * 101, address="host:1"), "member_id: "),
        (fleet_pb2.RegisterRequest(member_id="x", address="host:1", device="x" * 5000), "device: "),
        (rollout_pb2.GenerateRequest(sampling=work_pb2.Sampling(temperature=math.nan)), "temperature: "),
    ],
)
def test_what_no_service_sends_is_refused(message: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        check(message)
    assert told.value.what.startswith(words)
    assert told.value.what.endswith(".") and told.value.fix.endswith(".") and len(told.value.what) < 400


def test_every_rule_is_of_a_field_that_there_is() -> None:
    modules = (fleet_pb2, logs_pb2, nodes_pb2, rollout_pb2, trainer_pb2, weights_pb2, work_pb2)
    messages = [message for module in modules for message in module.DESCRIPTOR.message_types_by_name.values()]
    names = {field.name for message in messages for field in message.fields}
    whole = {f"{message.name}.{field.name}" for message in messages for field in message.fields}
    assert set(RULES) <= names | whole
