"""Weights & Biases. The API key is that which `tracking.api_key` names, WANDB_API_KEY, or comes from `wandb login`."""

from collections.abc import Mapping, Sequence

from millrace.rest import SampleView
from millrace.trackers import COLUMNS, TrackedJob, rows


class WeightsAndBiases:
    """One run for each job. After a restart of the coordinator the job continues in the same run. An offline run is in
    `<folder>/wandb`; `wandb sync` sends it later."""

    def __init__(self, job: TrackedJob) -> None:
        import wandb

        job.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=job.project,
            name=job.name,
            id=job.job_id,
            resume="allow",
            dir=str(job.folder),
            config=dict(job.spec),
            mode="offline" if job.offline else None,
            settings=wandb.Settings(api_key=job.api_key.get_secret_value()) if job.api_key is not None else None,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=rows(samples), allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()
