"""The PromQL that the dashboards are made of."""

from collections.abc import Mapping

INSTALLATION = 'installation=~"$installation"'
"""Selects what the variable says; at All also what has no such label, as where there is only one installation."""
MODEL = f'{INSTALLATION}, model=~"$model"'
REPLICA = f'{MODEL}, replica=~"$replica"'
TENANT = f'{MODEL}, tenant=~"$tenant"'

_PERCENTILES = (50, 95, 99)


def models_of(metric: str) -> Mapping[str, str]:
    """Return the variables that choose installations, and models of theirs, among the series of a metric."""
    return {
        "installation": f"label_values({metric}, installation)",
        "model": f"label_values({metric}{{{INSTALLATION}}}, model)",
    }


def rate(metric: str, selector: str = MODEL, *, by: str = "") -> str:
    """Return the rate of a counter, summed up."""
    return f"sum{_by(by)} (rate({metric}{{{selector}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return a ratio that has no value while there is no whole."""
    return f"{part} / ({whole} > 0)"


def quantile(percent: int, histogram: str, selector: str = MODEL, *, by: str = "") -> str:
    """Return a percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", selector, by=f"le, {by}" if by else "le")
    return f"histogram_quantile({percent / 100}, {buckets})"


def mean(histogram: str, selector: str = MODEL, *, by: str = "") -> str:
    """Return the mean of a histogram's or a summary's values."""
    return share(rate(f"{histogram}_sum", selector, by=by), rate(f"{histogram}_count", selector, by=by))


def percentiles(histogram: str, selector: str = MODEL) -> dict[str, str]:
    """Return the queries of a panel of percentiles."""
    return {f"p{percent}": quantile(percent, histogram, selector) for percent in _PERCENTILES}


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
