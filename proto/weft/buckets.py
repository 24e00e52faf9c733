"""Bounds of the histograms of times, in routers and replicas alike: what is told of one request can be compared."""

BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 75.0, 100.0),
)
"""1 ms to 100 s, each at most twice the one before."""
