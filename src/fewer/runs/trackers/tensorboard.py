"""TensorBoard: scalars by round in RUN/tensorboard; `tensorboard --logdir runs` shows all runs side by side.

Events are written synchronously, so a killed run keeps them and workers can be forked.
"""

from __future__ import annotations

import json
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from fewer.registry import TRACKERS
from fewer.runs.callbacks import Metrics, Run, Tracker
from fewer.runs.result import scalars

FOLDER = "tensorboard"


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Writes one file per start or resume. The last file has all rounds and takes precedence."""

    def on_run_start(self, run: Run) -> None:
        """Starts a file with the settings, or with all rounds so far."""
        assert run.path
        folder = run.path / FOLDER
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir()))
        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{number}.fewer"
        self._write(Event(file_version="brain.Event:2"))
        if number:  # discards all rounds of earlier files
            self._write(Event(step=1, session_log=SessionLog(status=SessionLog.START)))
        else:
            settings = run.hyperparameters().items()
            text = "\n".join(f"    {name} = {json.dumps(value, default=str)}" for name, value in settings)
            summary = _text_summary("settings", f"{run.method.name} {run.hash}\n\n{text}")
            self._write(Event(step=0, summary=Summary(value=[summary])))
        for metrics in run.history:
            self.on_round_end(run, metrics)

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Writes all scalars of a round."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics).items()]
        self._write(Event(step=metrics["round"], summary=Summary(value=values)))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Writes why the run stopped early, if it did."""
        if reason := run.end_reason(error):
            self._write(Event(summary=Summary(value=[_text_summary("stopped", reason)])))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with self._path.open("ab") as file:
            RecordWriter(file).write(event.SerializeToString())


def _text_summary(tag: str, text: str) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary.Value(tag=tag, metadata=create_summary_metadata(tag, None), tensor=tensor)
