"""Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, never from a job spec."""

from collections.abc import Mapping

from millrace.telemetry.trackers import Run


class WeightsAndBiases:
    """One run a job; a job that goes on after the coordinator restarted goes on in the same run."""

    def __init__(self, run: Run) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.job_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.spec),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
