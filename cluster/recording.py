"""Writes down what the autoscaler decides: each observation, and the number of replicas that follows from it."""

import msgspec
from weft.recording import FrameSink

from cluster.autoscaler import Autoscaler, AutoscalerConfig, Decision, Observation

KIND = "autoscaler"


class ScalingSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a recording: empty, for each autoscaler comes with its settings."""


class AutoscalerMade(msgspec.Struct, frozen=True, array_like=True, tag="autoscaler"):
    """From now on a model is watched, or watched by other rules."""

    number: int
    """Number of the autoscaler, by which later frames name it."""
    model: str
    config: AutoscalerConfig
    min_replicas: int
    max_replicas: int


class Decided(msgspec.Struct, frozen=True, array_like=True, tag="decide"):
    """A model was looked at."""

    now_s: float
    number: int
    """Number of the autoscaler."""
    observation: Observation
    """The latest observation; those before it are in earlier frames."""
    wanted: int
    decision: Decision


ScalingCall = AutoscalerMade | Decided


class ScalingRecording:
    """Makes autoscalers whose decisions go to a sink."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._num_autoscalers = 0
        sink.begin(KIND, ScalingSetup())

    def autoscaler(
        self, model: str, config: AutoscalerConfig, *, min_replicas: int, max_replicas: int
    ) -> "RecordingAutoscaler":
        """Return a new autoscaler."""
        self._num_autoscalers += 1
        self._sink.write(AutoscalerMade(self._num_autoscalers, model, config, min_replicas, max_replicas))
        return RecordingAutoscaler(
            self._num_autoscalers, config, min_replicas=min_replicas, max_replicas=max_replicas, sink=self._sink
        )


class RecordingAutoscaler(Autoscaler):
    """An autoscaler that also writes a frame for each decision."""

    def __init__(
        self, number: int, config: AutoscalerConfig, *, min_replicas: int, max_replicas: int, sink: FrameSink
    ) -> None:
        super().__init__(config, min_replicas=min_replicas, max_replicas=max_replicas)
        self._number = number
        self._sink = sink

    def decide(self, observation: Observation, wanted: int) -> Decision:
        """Return what follows from this observation and those before it."""
        decision = super().decide(observation, wanted)
        self._sink.write(Decided(observation.time_s, self._number, observation, wanted, decision))
        return decision
