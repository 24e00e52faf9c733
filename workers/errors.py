"""What the engine refuses or reports.

EngineError
├── InvalidRequestError     the request cannot be served as it is; says what was seen and what is allowed
├── RequestFailedError      this request failed while it ran; others go on
├── QueueFullError          the engine's waiting queue is full
├── EngineStoppedError      the engine is stopping, or has stopped
├── GroupFailedError        a rank died, hung or diverged; the whole group must be re-formed
└── EngineConfigError       the settings contradict each other or the model
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class InvalidRequestError(EngineError, ValueError):
    """The request cannot be served as it is; the message says what was seen and what is allowed."""


class RequestFailedError(EngineError):
    """This request failed while it ran; others go on."""


class QueueFullError(EngineError):
    """The engine's waiting queue is full."""


class EngineStoppedError(EngineError):
    """The engine is stopping, or has stopped, and takes no more requests."""


class GroupFailedError(EngineError):
    """A rank died, hung or diverged; the whole group must be re-formed."""


class EngineConfigError(EngineError, ValueError):
    """The settings contradict each other or the model."""
