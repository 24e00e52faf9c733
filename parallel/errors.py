"""What the split model refuses or reports.

ParallelError
├── ModelError                  a model folder or its split cannot be used
│   ├── UnsupportedModelError   the family, or something its config asks for, is not known
│   ├── ConfigError             config.json is missing, unreadable or contradicts itself
│   ├── CheckpointError         a weight file is missing or corrupt, or a tensor is missing or of a wrong shape or dtype
│   └── ParallelismError        the model cannot be divided over this many ranks
├── CollectiveError             a peer rank went away or timed out during a collective
├── DeviceError                 the device, or the kernels for it, cannot be had on this machine
└── GraphCaptureError           a step could not be recorded as a CUDA graph
"""


class ParallelError(Exception):
    """Base of everything the split model raises on purpose."""


class ModelError(ParallelError, ValueError):
    """A model folder, or the way it is to be split, cannot be used."""


class UnsupportedModelError(ModelError):
    """The model family, or a feature its config asks for, is not known; the message lists what is."""


class ConfigError(ModelError):
    """config.json is missing, unreadable or contradicts itself."""


class CheckpointError(ModelError):
    """A weight file is missing or corrupt, or a tensor in it is missing or has the wrong shape or dtype."""


class ParallelismError(ModelError):
    """The model cannot be divided over this many tensor- or pipeline-parallel ranks."""


class CollectiveError(ParallelError, RuntimeError):
    """A peer rank went away or timed out during a collective."""


class DeviceError(ParallelError, RuntimeError):
    """The device that was asked for, or the kernels for it, cannot be had on this machine."""


class GraphCaptureError(ParallelError, RuntimeError):
    """A step could not be recorded as a CUDA graph, though its layers can be; the process is not to go on."""
