"""MLflow: settings and figures by round, in MLFLOW_TRACKING_URI or, without it, in mlflow.db beside the run.

Nothing is told to anyone else: MLflow's own telemetry is switched off.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}  # before its import

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fewer.registry import TRACKERS
from fewer.runs.trackers import About, Figures, scalars

EXPERIMENT = "fewer"
RUN = "fewer.run"
"""The tag by which the MLflow run of a run directory is found again when that goes on."""
MOST = 500
"""Characters that MLflow takes for a setting."""


@TRACKERS.register("mlflow")
class MLflow:
    """One MLflow run for one run directory, however often that is broken off."""

    def __init__(self, about: About, history: Sequence[Figures]) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        path = about.path.resolve()
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path.parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=where)
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        quoted = f"{path}".replace("'", "")
        query = f"tags.`{RUN}` = '{quoted}'"  # without a round behind it, it is another run in the same place
        found = self._client.search_runs([experiment], query, max_results=1) if history else []
        if found:
            self._run: str = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {RUN: quoted, "fewer.method": about.method, "fewer.hash": about.hash}
            self._run = self._client.create_run(experiment, tags=tags, run_name=path.name).info.run_id
            params = [Param(name, str(value)[:MOST]) for name, value in about.settings.items()]
            for start in range(0, len(params), 100):  # more are not taken at once
                self._client.log_batch(self._run, params=params[start : start + 100])
        done = max((metric.step for metric in self._client.get_metric_history(self._run, "up")), default=0)
        for figures in history:
            if figures["round"] > done:
                self.round(figures)

    def round(self, figures: Figures) -> None:
        """All scalars of a round."""
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, figures["round"]) for name, value in scalars(figures).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, reason: str) -> None:
        """It has ended, well or not."""
        if reason:
            self._client.set_tag(self._run, "fewer.stopped", reason)
        self._client.set_terminated(self._run, "KILLED" if reason else "FINISHED")
