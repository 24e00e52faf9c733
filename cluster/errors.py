"""What the cluster refuses or reports.

ClusterError
├── ClusterConfigError      a flag or the YAML file is wrong; the message begins with the dotted path
├── ModelNotFoundError      no folder, packaged model or hub id of this name can be had, or a file of it read
├── ModelFilesChangedError  a folder has other files than when the model's revision was wanted
├── SavedStateError         what the controller before has saved cannot be read
├── StartError              the service did not come up; the message says what stopped it
│   └── StoppedAtStartError     somebody has stopped it before it was ready
├── RayStartError           Ray could not be started or reached
├── SpareError              (stays inside) Ray keeps no processes ready: starts take longer, and nothing else
├── NotServedError          no model, replica, group or node of this name; the message lists those there are
├── StoppingError           the service is being stopped, and nothing is changed any more
├── GroupTerminatedError    a replica group was told to end from outside, by SIGTERM
├── ControllerError         the controller cannot be reached, or answered with an error
│   └── ServiceStoppedError     nobody answers, and the last answer was that the service is being stopped
└── RequestError            the router cannot be reached, or refused the request
"""


class ClusterError(Exception):
    """Base of everything the cluster raises on purpose."""


class ClusterConfigError(ClusterError, ValueError):
    """A flag or the YAML file is wrong; the message begins with the dotted path."""


class ModelNotFoundError(ClusterError):
    """No folder, packaged model or hub id of this name can be had, or a file of it read."""


class ModelFilesChangedError(ClusterError):
    """A folder has other files than when the model's revision was wanted."""


class SavedStateError(ClusterError):
    """What the controller before has saved cannot be read, as where other code has saved it."""


class StartError(ClusterError):
    """The service did not come up; the message says what stopped it."""


class StoppedAtStartError(StartError):
    """Somebody has stopped the service before it was ready."""


class RayStartError(ClusterError):
    """Ray could not be started or reached."""


class SpareError(ClusterError):
    """Ray keeps no processes ready: starts take longer, and nothing else."""


class NotServedError(ClusterError, LookupError):
    """No model, replica, group or node of this name; the message lists those there are."""


class StoppingError(ClusterError):
    """The service is being stopped, and nothing is changed any more."""


class GroupTerminatedError(ClusterError):
    """A replica group was told to end from outside, by SIGTERM."""


class ControllerError(ClusterError):
    """The controller cannot be reached, or answered with an error."""


class ServiceStoppedError(ControllerError):
    """Nobody answers, and the last answer was that the service is being stopped."""


class RequestError(ClusterError):
    """The router cannot be reached, or refused the request."""
