"""Where a service listens and commands look for it unless told otherwise; apart from config.py, which imports much."""

DEFAULT_HOST = "127.0.0.1"
DEFAULT_CONTROL_PORT = 50050
DEFAULT_CONTROL_METRICS_PORT = 9465
RANK_METRICS_PORTS = range(20500, 20756)
"""Each rank of a node has its metrics at the first of these that is free, so that a firewall can tell them from what
only routers and other ranks are to reach. Below what Linux gives to whoever asks for any port, above Ray's workers."""
