"""From what a job says of its environment to what its episodes use."""

from millrace.environments.built_in import BUILT_IN
from millrace.spec.environment import Environment
from millrace.spec.model import Reward
from services.rollout.episodes.environments import Environments, ToolsAlone
from services.rollout.episodes.processes import EnvironmentPool


def environments_of(environment: Environment, reward: Reward) -> Environments:
    """The environment of a job, not started, with the limits of its `reward`. Raises InvalidJob."""
    itself = _itself(environment, reward)
    if not environment.mcp:
        return itself
    from services.rollout.episodes.mcp_tools import WithServers  # the library mcp may be missing without servers

    return WithServers.of_job(itself, environment, reward)


def _itself(environment: Environment, reward: Reward) -> Environments:
    if environment.name not in BUILT_IN:
        return EnvironmentPool.of_job(environment, reward)
    return ToolsAlone(environment.processes)
