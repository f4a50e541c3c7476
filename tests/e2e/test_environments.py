"""Episodes of several turns in a whole job of real processes, while a replica is killed and a tool hangs."""

import pytest

from millrace.drops import DropReason
from tests.e2e.conftest import adds_up, finished, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TALK = """
import asyncio, time
from millrace.environments import Environment

class Talk(Environment):
    async def reset(self, row):
        self.hangs, self.turns = row["index"] % 8 == 5, 0
        return await super().reset(row)

    async def step(self, message):
        self.turns += 1
        if self.hangs:
            time.sleep(3600)
        await asyncio.sleep(0.2)
        return "go on", 0.1 * sum(letter in "aeiou" for letter in message["content"]), self.turns == 3
"""


@pytest.mark.matrix  # test_side_by_side.py and test_leases.py of the replica have its parts
def test_a_replica_dies_in_a_turn_and_a_tool_hangs(start, another_replica, job, tmp_path):
    """One row in eight hangs: its group is dropped with the reason. Nothing else is lost."""
    (tmp_path / "talk.py").write_text(TALK)
    environment = {"name": f"{tmp_path}/talk.py:Talk", "max_turn_tokens": 32, "call_s": 2.0}
    job["rollout"] |= {"environment": {**environment, "processes": 1, "episodes_per_process": 32}, "lease_s": 10}
    job["data"]["max_prompt_tokens"] = 256
    job["trainer"]["token_budget"] = 8192
    stack = start(replicas=1, engine="transformers")
    client = stack.client()
    late = another_replica(stack, "transformers")
    until("both replicas are there", lambda: len(client.fleet().replicas) == 2, 120)
    view = client.submit(job)

    def generates_there():
        first = {r.id for r in client.fleet().replicas if r.running}
        return len(first) == 2 and client.ledger(view.id).leased > 1

    until("both replicas are in a turn", generates_there, 240)
    late.kill()
    late.wait()

    done = finished(client, view.id, 300)
    adds_up(client, done)
    reasons = client.ledger(view.id).reasons
    assert set(reasons) <= {DropReason.ENVIRONMENT_FAILED, DropReason.JOB_SUCCEEDED}, reasons
    assert reasons[DropReason.ENVIRONMENT_FAILED] >= 1, "one row in eight hangs"
    last = client.metrics(view.id)[-1].values
    assert last["num_turns/mean"] == 3.0 and last["rollout_corr/k3_kl"] < 1e-3
