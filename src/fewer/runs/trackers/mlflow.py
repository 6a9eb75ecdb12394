"""MLflow: settings, and metrics by round, sent to MLFLOW_TRACKING_URI or to mlflow.db next to the run.

MLflow's own telemetry is switched off.
"""

from __future__ import annotations

import logging
import os
import time

os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}  # before its import

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fewer.registry import TRACKERS
from fewer.runs.callbacks import Metrics, Run, Tracker
from fewer.runs.result import scalars

EXPERIMENT = "fewer"
RUN = "fewer.run"
"""The tag that links an MLflow run to its run directory."""
MAX_CHARACTERS = 500
"""MLflow's limit for the value of a setting."""


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """One MLflow run per run directory, also after resuming."""

    def on_run_start(self, run: Run) -> None:
        """Starts an MLflow run, or continues it with the rounds that it does not have yet."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        assert run.path
        path = run.path.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path.parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = existing.experiment_id if existing else self._client.create_experiment(EXPERIMENT)
        tag_value = f"{path}".replace("'", "")
        query = f"tags.`{RUN}` = '{tag_value}'"  # a run without history is new, even in a known directory
        earlier_runs = self._client.search_runs([experiment], query, max_results=1) if run.history else []
        if earlier_runs:
            self._run: str = earlier_runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {RUN: tag_value, "fewer.method": run.method.name, "fewer.hash": run.hash}
            self._run = self._client.create_run(experiment, tags=tags, run_name=path.name).info.run_id
            params = [Param(name, str(value)[:MAX_CHARACTERS]) for name, value in run.hyperparameters().items()]
            for start in range(0, len(params), 100):  # MLflow's limit per call
                self._client.log_batch(self._run, params=params[start : start + 100])
        done = max((metric.step for metric in self._client.get_metric_history(self._run, "up")), default=0)
        for metrics in run.history:
            if metrics["round"] > done:
                self.on_round_end(run, metrics)

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Logs all scalars of a round."""
        now = int(1000 * time.time())
        logged = [Metric(name, value, now, metrics["round"]) for name, value in scalars(metrics).items()]
        self._client.log_batch(self._run, metrics=logged)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Marks the run as finished or stopped."""
        if reason := run.end_reason(error):
            self._client.set_tag(self._run, "fewer.stopped", reason)
        self._client.set_terminated(self._run, "KILLED" if error else "FINISHED")
