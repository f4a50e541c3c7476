"""MLflow, by the client package `mlflow-skinny`. The server is MLFLOW_TRACKING_URI of the coordinator's environment;
credentials are read from the environment by MLflow itself, never from a job spec."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.rest import SampleView
from millrace.trackers import COLUMNS, TrackedJob, rows
from millrace.validation.kinds import leaves

if TYPE_CHECKING:
    from mlflow import MlflowClient

JOB_TAG = "millrace.job_id"
TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag in which MLflow's page looks for the tables of a run."""
TABLES = 80
"""Tables that the tag names, the newest ones: its value has at most 8,000 characters. The files of all are kept."""
BATCH = 100
"""Most parameters that one call may have; of metrics it may have 1,000."""
BATCH_METRICS = 1000
NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)


class MLflow:
    """One run for each job, in the experiment named as the job's project. After a restart of the coordinator the job
    continues in the same run.

    Without MLFLOW_TRACKING_URI, or offline, the run is in `<folder>/mlflow.db` with its files in
    `<folder>/mlflow-artifacts`; `mlflow ui --backend-store-uri sqlite:///<folder>/mlflow.db` shows it.
    """

    def __init__(self, job: TrackedJob) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        job.folder.mkdir(parents=True, exist_ok=True)
        server = "" if job.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{job.folder.absolute()}/mlflow.db")
        files = None if server else (job.folder.absolute() / "mlflow-artifacts").as_uri()
        self._run = self._open_run(job, _experiment(self._client, job.project, files))
        self._tables = json.loads(self._client.get_run(self._run).data.tags.get(TABLES_TAG, "[]"))

    def _open_run(self, job: TrackedJob, experiment: str) -> str:
        """Id of the job's run: the one of an earlier start, or a new one."""
        earlier = self._client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{job.job_id}'", max_results=1)
        if earlier:
            run: str = earlier[0].info.run_id
            self._client.update_run(run, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=job.name, tags={JOB_TAG: job.job_id}).info.run_id
            self._log_parameters(run, job)
        self._client.log_dict(run, dict(job.spec), "spec.json")  # a resumed job may have a changed spec
        return run

    def _log_parameters(self, run: str, job: TrackedJob) -> None:
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        fields = [(NOT_ALLOWED.sub("_", name), value) for name, value in leaves(job.spec)]
        texts = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in fields]
        parameters = [Param(name, text[:MAX_PARAM_VAL_LENGTH]) for name, text in texts]
        for start in range(0, len(parameters), BATCH):
            self._client.log_batch(run, params=parameters[start : start + BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), BATCH_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + BATCH_METRICS])

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        path = f"samples/step-{step:06}.json"
        self._client.log_dict(self._run, {"columns": list(COLUMNS), "data": rows(samples)}, path)
        self._tables = [table for table in self._tables if table["path"] != path][1 - TABLES :]
        self._tables.append({"path": path, "type": "table"})
        self._client.set_tag(self._run, TABLES_TAG, json.dumps(self._tables))

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _experiment(client: "MlflowClient", name: str, files: str | None) -> str:
    """Id of the experiment, which is created if it does not exist. `files`: where its files are; None: the server
    chooses."""
    found = client.get_experiment_by_name(name)
    identity: str = found.experiment_id if found else client.create_experiment(name, artifact_location=files)
    return identity


def _name(metric: str) -> str:
    """The metric's name in the characters that MLflow takes: `mean@4` becomes `mean_at_4`, as in verl."""
    return NOT_ALLOWED.sub("_", metric.replace("@", "_at_"))
