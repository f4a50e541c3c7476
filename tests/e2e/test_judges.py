"""A job whose reward is a judge's in part: the judge is down for 20 s in the middle of it."""

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.drops import DropReason
from millrace.events import JobWaiting
from millrace.rest import WaitingFor
from tests.e2e.conftest import adds_up, finished, until

# The same in a replica alone is services/rollout/judges/test_in_replica.py.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]
DOWN_S = 20.0


class Asked(http.server.BaseHTTPRequestHandler):
    """Gives each answer one hundredth of its length."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = len(asked["messages"][-1]["content"]) / 100
        told = json.dumps({"choices": [{"message": {"content": f"Score: {score}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *arguments: object) -> None:
        """Prints nothing."""


class Judge:
    """A judge that can be taken down. Its port stays the same."""

    def __init__(self) -> None:
        self.port = 0

    def up(self) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Asked)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def down(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    judge.up()
    yield judge
    judge.down()


def test_a_judge_that_is_down_for_20_s_costs_nothing(client, job, judge):
    url = f"http://127.0.0.1:{judge.port}/v1"
    vowels = {"name": "vowels", "function": job["reward"]["function"]}
    judged = {"name": "length", "judge": {"url": url, "model": "j", "prompt": "{{answer}}"}, "weight": 0.5}
    job["reward"] = {"functions": [vowels, judged], "workers": 1}
    job["rollout"] |= {"lease_s": 5, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 8}
    view = client.submit(job)
    until("two steps", lambda: client.job(view.id).step >= 2, 240)
    judge.down()
    began = time.monotonic()
    waiting = until("the job says so", lambda: client.job(view.id).waiting, 60)
    assert waiting.reason is WaitingFor.JUDGE and "the judge length does not answer 1 of 1 replica: " in waiting.message
    time.sleep(max(0.0, DOWN_S - (time.monotonic() - began)))
    assert client.job(view.id).step < 8
    judge.up()
    done = finished(client, view.id)
    adds_up(client, done)
    assert DropReason.REWARD_FAILED not in client.ledger(view.id).reasons
    events = list(client.events(view.id, follow=False))
    assert any(isinstance(e.data, JobWaiting) and e.data.reason is WaitingFor.JUDGE for e in events)
    assert not any(e.kind == "lease.expired" for e in events)
    rows = [row.values for row in client.metrics(view.id) if row.step]
    assert max(row["timing_s/score/max"] for row in rows) > DOWN_S - 5, "the seconds are told"
    assert all("rewards/length/mean" in row for row in rows)
