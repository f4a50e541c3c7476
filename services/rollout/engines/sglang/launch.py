"""Starts and ends SGLang's Engine: of a replica on one host, of a leader, and of a follower."""

import atexit
import contextlib
import os
from typing import Any

import psutil

from millrace.errors import InvalidJob, Unavailable
from millrace.local.folders import short_temporary_folder
from millrace.spec import JobSpec
from millrace.telemetry import logs
from services.rollout.engines.adapter import adapter_shape
from services.rollout.engines.sglang import options as sglang_options
from services.rollout.nodes.place import EngineStart


def start_engine(spec: JobSpec, start: EngineStart | None) -> Any:
    """SGLang's Engine, once its processes have started: on a follower the schedulers alone. Takes seconds to minutes.
    Raises InvalidJob for what the job asks wrongly, Unavailable if it does not start."""
    from sglang.srt.entrypoints.engine import Engine

    from services.rollout.engines.sglang.worker import run_scheduler_process

    sglang_options.check_api()

    class ReplicaEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler_process)

    try:
        # SGLang's sockets have names of tempfile's.
        with logs.root_logger_restored(), short_temporary_folder():
            engine = ReplicaEngine(**sglang_options.server_arguments(spec, adapter_shape(spec), start))
    except (ValueError, TypeError, OSError, AssertionError) as error:
        what = f"SGLang refused model.path {spec.model.path} with rollout.engine_options: {error}."
        raise InvalidJob(what, "fix the named option; SGLang's log above says more.") from error
    except (RuntimeError, MemoryError, EOFError) as error:
        what = f"SGLang did not start with {spec.model.path}: {error}."
        raise Unavailable(what, "its log above names the cause; memory and CUDA devices first.") from error
    # At exit it would end every descendant of this process, the replica's own too.
    atexit.unregister(engine.shutdown)
    return engine


def shut_down(engine: Any) -> None:
    """Ends all processes of an Engine."""
    manager = engine.tokenizer_manager  # a follower has none
    if manager is not None and (watchdog := manager._subprocess_watchdog) is not None:
        watchdog.stop()
    if engine.send_to_rpc is not None:
        engine.send_to_rpc.close(linger=0)
    below = [psutil.Process(pid) for pid in engine.get_all_child_pids() if psutil.pid_exists(pid)]
    further = [child for process in below for child in process.children(recursive=True)]
    for process in [*below, *further]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([*below, *further], timeout=10.0)


def lives(pid: int) -> bool:
    """Whether the process runs."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def set_environment() -> None:
    """Sets environment variables for SGLang, before it is imported. Variables that the user has set are kept."""
    # SGLang's context is a few tokens longer than the job's (SLACK), and maybe than the model's.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    # SGLang turns it off in its own processes; a rank that has it on cannot connect to one that has it off.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")
    # A follower's Engine would wait for its schedulers to end, and listen on a port meanwhile.
    os.environ.setdefault("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
