"""What a benchmark refuses or reports; the `weft` command tells them as it tells the cluster's own.

ClusterError
├── ClusterConfigError
│   └── BenchConfigError    a flag, or a file of prompts or of a trace, is wrong
└── BenchError              the service cannot be reached, or something that is wanted is not installed
"""

from cluster.errors import ClusterConfigError, ClusterError


class BenchError(ClusterError):
    """The service cannot be reached, or something that is wanted is not installed."""


class BenchConfigError(ClusterConfigError):
    """A flag, or a file of prompts or of a trace, is wrong."""
