"""The GRPO step: from references to groups to new weights and metrics. Runs on every rank alike."""

import torch

from millrace.spec import JobSpec
from millrace.wire.v1.trainer_pb2 import StepRequest
from services.trainer import lockstep
from services.trainer.assess import Passes, assess, passes_needed, scored
from services.trainer.backends import Backend
from services.trainer.batch import Batch, Division
from services.trainer.control import ControlThread
from services.trainer.fetch import fetch
from services.trainer.metrics import Clock, mismatch, over_updates
from services.trainer.rollback import all_or_nothing
from services.trainer.schedule import learning_rate, random_seed
from services.trainer.update import update


def grpo_step(spec: JobSpec, backend: Backend, request: StepRequest, control: ControlThread) -> dict[str, float]:
    """One step; returns its metrics. Raises NonFinite, with the trajectory named and the weights as they were, where
    a number is none; InvalidState or Unavailable where the trajectories cannot be had."""
    clock, parallel = Clock(), backend.data_parallel
    torch.manual_seed(random_seed(spec, request.step, parallel.rank))
    with clock("fetch"), lockstep.together():
        division = Division.of(
            request.groups, backend, updates=spec.trainer.updates_per_step, token_budget=spec.trainer.token_budget
        )
        wanted = [division.trajectories[index] for index in division.indices(parallel.rank)]
        samples = control.run(fetch(request.work_address, request.job_id, wanted))
        batch = Batch(division, samples, parallel, backend.device)
    needed = passes_needed(spec, updates=len(batch.updates))
    with clock("old_log_prob"):
        train_bt = scored(spec, backend, batch, reference=False) if needed.train else None
    with clock("ref"):
        ref_bt = scored(spec, backend, batch, reference=True) if needed.reference else None
    with clock("adv"):
        columns, metrics = assess(spec, batch, Passes(train_bt, ref_bt))
    with clock("update_actor"), all_or_nothing(backend, needed=len(batch.updates) > 1):
        lr = learning_rate(spec, request.step)
        updates = [update(spec, backend, batch, microbatches, columns, lr) for microbatches in batch.updates]
    # The first update's pass is over the weights that the step began with, so it can be compared with the engine's.
    first = [batch.whole(values_bt) for values_bt in (updates[0].logprobs_bt, batch.rollout_bt, updates[0].mask_bt)]
    tokens = sum(trajectory.tokens for trajectory in division.trajectories)
    return {
        **mismatch(*first),
        **metrics,
        **over_updates([done.metrics for done in updates]),
        **division.metrics(backend),
        **lockstep.maxima(backend.memory()),
        **clock.metrics(tokens, parallel.size),
        "training/global_step": float(request.step),
    }
