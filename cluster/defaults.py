"""Where a service listens and commands look for it unless told otherwise; apart from config.py, which imports much."""

DEFAULT_HOST = "127.0.0.1"
DEFAULT_CONTROL_PORT = 50050
DEFAULT_CONTROL_METRICS_PORT = 9465
