"""Which tests are slow, and which run side by side where `make test` has several workers.

Files are handed to the workers, those that take longest first; a file stays on one worker, for its fixtures' sake. The
last worker begins with the files that mostly wait, so that the others have the cores.
"""

import ast
import atexit
import functools
import gc
import os
import sys
from typing import Any

import pytest
from hypothesis import settings

from tests.run_servers import RunServers

settings.register_profile("default", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
"""`make test` tries the same examples each time, so a failure belongs to the change. `make test-all` draws new examples
(`--hypothesis-profile default`). Other tests run beside an example, so it may take as long as it does."""

os.environ["MILLRACE_STRICT_METRICS"] = "1"
"""Here and in every process that a test starts: a metric that nobody declared is an error."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Here and in every process that a test starts: torch's threads wait for each other in a loop, and take the cores from
the tests beside."""

if sys.version_info < (3, 12):
    PARSE = ast.parse

    @functools.wraps(PARSE)
    def parse(*arguments: Any, **named: Any) -> Any:
        """As in `millrace/imports.py`: CPython 3.11 disturbs threads that parse at the same time, and
        so pytest, which parses what it tells of a failure, and Hypothesis."""
        for _ in range(4):
            try:
                return PARSE(*arguments, **named)
            except SystemError:
                continue
        return PARSE(*arguments, **named)

    ast.parse = parse

MEGATRON = "services/trainer/backends/megatron"
BUSY = (
    "e2e/test_algorithms.py",
    "e2e/test_publication_faults.py",
    "e2e/test_chaos.py",
    f"{MEGATRON}/test_parity.py",
    "services/rollout/engines/test_engines.py",
    "e2e/test_recovery.py",
    f"{MEGATRON}/test_vllm.py",
    "services/trainer/ranks/test_ranks.py",
    f"{MEGATRON}/test_job.py",
    "services/trainer/publication/test_shards_over_ranks.py",
    "services/rollout/test_process.py",
    "services/trainer/step/test_critic.py",
    "services/trainer/service/test_process.py",
    "bench/test_publication.py",
    "services/rollout/environments/test_mcp.py",
    "docs/test_contributing.py",
    "test_cli.py",
    "services/rollout/scoring/test_hostile.py",
    "services/rollout/test_launch.py",
)
"""The files that take half a minute and more beside other tests, the longest first: what comes last would keep one
worker busy alone."""
WAITING = ("services/coordinator/", "local/test_supervisor.py", "services/trainer/ranks/test_commands.py")
"""The files and folders that take long and mostly wait: for deadlines to pass and losses to be noticed."""
WAITING_LONGEST = (
    "services/coordinator/test_recovery.py",
    "services/coordinator/test_high_availability.py",
    "local/test_supervisor.py",
    "services/coordinator/jobs/test_streaming.py",
    "services/coordinator/publication/test_publisher.py",
    "services/coordinator/test_redis_elsewhere.py",
)
"""Of those the files that take half a minute and more, the longest first."""
TOGETHER = {
    f"{MEGATRON}/test_checkpoint.py": f"{MEGATRON}/test_parity.py",
    f"{MEGATRON}/test_pieces.py": f"{MEGATRON}/test_parity.py",
    f"{MEGATRON}/test_critic.py": f"{MEGATRON}/test_job.py",
    "e2e/agents/test_agent_programs.py": "e2e/test_algorithms.py",
    "e2e/agents/test_tool_servers.py": "e2e/test_algorithms.py",
    "e2e/test_adapters.py": "e2e/test_algorithms.py",
    "e2e/test_diagnosis.py": "e2e/test_algorithms.py",
    "e2e/test_poison.py": "e2e/test_algorithms.py",
    "e2e/test_recipes.py": "e2e/test_algorithms.py",
    "e2e/test_replay.py": "e2e/test_algorithms.py",
    "e2e/test_timeline.py": "e2e/test_algorithms.py",
    "services/rollout/engines/test_adapter_places.py": "services/rollout/engines/test_engines.py",
    "services/rollout/engines/test_fp8_folder.py": "services/rollout/engines/test_engines.py",
    "services/rollout/engines/test_hybrid.py": "services/rollout/engines/test_engines.py",
    "services/rollout/engines/test_image_prompts.py": "services/rollout/engines/test_engines.py",
    "services/rollout/engines/test_vllm_adapters.py": "services/rollout/engines/test_engines.py",
    "services/rollout/engines/test_vllm_options.py": "services/rollout/engines/test_engines.py",
}
"""Files that share a session's fixture which takes long to make, or the server from which vLLM is forked: file → the
file with which it runs."""
SERVERS = pytest.StashKey[RunServers]()
STARTING = {"of_the_file", "ranks", "two_ranks", "whole", "start", "stack"}
"""Fixtures that start services or ranks. A test that uses one is slow."""


def unit(nodeid: str) -> str:
    """What a test belongs to that stays on one worker: its file, below tests/, or the file with which that runs."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    return TOGETHER.get(path, path)


@pytest.hookimpl(tryfirst=True)  # before the marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if STARTING & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        turn = {path: number for number, path in enumerate((*BUSY, *WAITING_LONGEST))}
        items.sort(key=lambda item: turn.get(unit(item.nodeid), len(turn)))


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Collections of garbage leave out the tests and modules that are loaded now: they stay to the end, and to look
    through all of them takes a second. At exit they are looked at, as libraries tell whether anything of theirs is
    left."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Any) -> None:
    servers = config.stash[SERVERS] = RunServers(config.invocation_params.args)
    config.add_cleanup(servers.end)
    for spec in specs:
        spec.python = servers.python


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus and (servers := config.stash.get(SERVERS, None)):
        terminalreporter.section("servers of the run: their last lines")
        for line in list(servers.errors())[-50:]:
            terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def _assign_work_unit(self, node: object) -> None:
            last = self.numnodes > 1 and node.gateway.id == f"gw{self.numnodes - 1}"
            preferred = [one for one in self.workqueue if one.startswith(WAITING) == last]
            if preferred:
                self.workqueue.move_to_end(preferred[0], last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # by the number of tests, which says little about their time
    return ByUnit(config, log)
