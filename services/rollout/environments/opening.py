"""Makes what a job's episodes use, from what the job says of its environment.

What needs a library that not every replica has is imported only for jobs that use it.
"""

from millrace.environments.built_in import BUILT_IN, VERIFIERS, OpenEnv, Verl, options_of
from millrace.spec.environment import Environment
from millrace.spec.model import Reward
from services.rollout.environments.environment import Environments, ToolsAlone
from services.rollout.environments.processes import EnvironmentPool

VERL_CLASS = "millrace.environments.verl.environment:VerlEnvironment"


def environments_of(environment: Environment, reward: Reward) -> Environments | None:
    """The environment of a job, not started, with the limits of its `reward`; None if a host plays the episodes by
    itself. Raises InvalidJob."""
    if environment.name == VERIFIERS:
        return None
    itself = _itself(environment, reward)
    if not environment.mcp:
        return itself
    from services.rollout.environments.mcp_tools import WithServers

    return WithServers.of_job(itself, environment, reward)


def _itself(environment: Environment, reward: Reward) -> Environments:
    if environment.name not in BUILT_IN:
        return EnvironmentPool.of_job(environment, reward)
    options = options_of(environment.name, environment.options)
    if isinstance(options, OpenEnv):
        from services.rollout.environments.openenv import OpenEnvServer

        return OpenEnvServer(options, environment.processes, environment.call_s)
    if isinstance(options, Verl):
        return EnvironmentPool.of_class(VERL_CLASS, environment, reward, options.folders)
    return ToolsAlone(environment.episodes_at_once)
