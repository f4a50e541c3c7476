"""Which tests run side by side where `make test` has several workers: files, those that take longest first.

A file stays on one worker, for its fixtures' sake.
"""

import os

import pytest

os.environ["MILLRACE_STRICT_METRICS"] = "1"
"""Here and in every process that a test starts: a metric that nobody declared is an error."""

MEGATRON = "services/trainer/backends/megatron"
LONG = (
    "e2e/test_elastic.py",
    "e2e/test_publication_faults.py",
    "services/rollout/engines/test_engines.py",
    f"{MEGATRON}/test_vllm.py",
    "services/trainer/ranks/test_ranks.py",
    f"{MEGATRON}/test_parity.py",
    "e2e/test_recovery.py",
    f"{MEGATRON}/test_job.py",
    "services/trainer/publication/test_shards_over_ranks.py",
    "services/rollout/test_process.py",
    "services/coordinator/test_recovery.py",
    "local/test_supervisor.py",
    "e2e/test_algorithms.py",
    "services/coordinator/test_process.py",
    "services/coordinator/publication/test_publication.py",
    "services/trainer/step/test_critic.py",
    "services/trainer/ranks/test_commands.py",
    "services/trainer/service/test_process.py",
    "bench/test_publication.py",
)
"""Half a minute and more, the longest first; what comes last would keep one worker busy alone."""
TOGETHER = {
    f"{MEGATRON}/test_checkpoint.py": f"{MEGATRON}/test_parity.py",
    f"{MEGATRON}/test_critic.py": f"{MEGATRON}/test_job.py",
}
"""Files that share a session's fixture which takes long to make: file → that beside which it runs."""


def unit(nodeid: str) -> str:
    """What a test belongs to that stays on one worker: its file, below tests/, or the one beside which that runs."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    return TOGETHER.get(path, path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        turn = {path: number for number, path in enumerate(LONG)}
        items.sort(key=lambda item: turn.get(unit(item.nodeid), len(turn)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says little about their time
    return ByUnit(config, log)
