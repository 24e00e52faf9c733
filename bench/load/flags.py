"""From the texts of flags to the values that they mean. Raises BenchConfigError, which names the flag."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TypeVar
from urllib.parse import urlsplit

from weft.addresses import join_host_port

from bench.errors import BenchConfigError
from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay
from bench.load.calls import Lengths
from bench.load.dataset_files import TraceLimits
from bench.load.datasets import DatasetKind, DatasetOptions
from bench.load.flag_groups import (
    DEFAULT_ROUTER,
    DEFAULT_URL,
    GoalFlags,
    LoadFlags,
    PromptFlags,
    RankFlags,
    ServiceFlags,
    SessionFlags,
)
from bench.load.sender import Protocol, Target
from bench.load.statistics import Targets
from bench.load.utilization import Peak
from bench.load.workloads import DEFAULT_WORKLOADS, WORKLOADS
from cluster.cli_flags import check_address, given
from cluster.defaults import DEFAULT_CONTROL_PORT
from router.errors import RouterConfigError
from router.tls import ClientTls

DEFAULT_CONCURRENCY = 8

_MADE = (DatasetKind.RANDOM, DatasetKind.SHARED_PREFIX, DatasetKind.SESSIONS)
_LOOKED_AT = {
    "vocab_size": tuple(kind for kind in DatasetKind if kind is not DatasetKind.PROMPTS),
    "input_tokens": _MADE,
    "output_tokens": (*_MADE, DatasetKind.PROMPTS),
    "prefix_tokens": (DatasetKind.SHARED_PREFIX, DatasetKind.SESSIONS),
    "num_prefixes": (DatasetKind.SHARED_PREFIX, DatasetKind.SESSIONS),
    "turns": (DatasetKind.SESSIONS,),
    "think_time": (DatasetKind.SESSIONS, DatasetKind.PROMPTS),
    "length_scale": (DatasetKind.TRACE,),
    "max_input_tokens": (DatasetKind.TRACE,),
    "max_output_tokens": (DatasetKind.TRACE,),
}
"""The kinds of datasets that look at each flag."""
_NEEDED = {"burstiness": "rate", "speed": "replay"}
"""The flag that must be given for a flag to mean something."""

_Kind = TypeVar("_Kind", bound=StrEnum)
_Number = TypeVar("_Number", int, float)


def choose(flag: str, text: str, kinds: type[_Kind]) -> _Kind:
    """Return a member of a closed set."""
    try:
        return kinds(text)
    except ValueError:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: {', '.join(kinds)}") from None


def parse_lengths(flag: str, text: str) -> Lengths:
    """Parse a number, or a range as in 32-256."""
    low, dash, high = text.partition("-")
    try:
        lengths = Lengths(low=int(low), high=int(high if dash else low))
    except ValueError:
        lengths = Lengths(low=0, high=0)
    if not 1 <= lengths.low <= lengths.high:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: a number, or a range as in 32-256, from 1 on")
    return lengths


def parse_datasets(
    workloads: Sequence[str], dataset: str | None, prompts: PromptFlags, *, is_bounded: bool
) -> tuple[DatasetOptions, ...]:
    """Return what an engine in this process is given: workloads, or a dataset."""
    if dataset is not None:
        if workloads:
            raise BenchConfigError("--workload and --dataset are both given; allowed: one of them")
        return (parse_dataset(dataset, prompts, is_bounded=is_bounded),)
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown:
        raise BenchConfigError(f"--workload is {unknown[0]!r}; allowed: {', '.join(WORKLOADS)}")
    return tuple(parse_dataset(name, prompts) for name in dict.fromkeys(workloads or DEFAULT_WORKLOADS))


def parse_dataset(name: str, prompts: PromptFlags, *, think_s: float = 0.0, is_bounded: bool = False) -> DatasetOptions:
    """Return what is sent; `is_bounded`: a flag says how much, so that a file's prompts are sent again until it is."""
    return DatasetOptions(
        kind=choose("--dataset", name, DatasetKind),
        file=prompts.file,
        has_end=not is_bounded,
        inputs=parse_lengths("--input-tokens", prompts.input_tokens),
        outputs=parse_lengths("--output-tokens", prompts.output_tokens),
        prefix_tokens=prompts.prefix_tokens,
        num_prefixes=prompts.num_prefixes,
        turns=parse_lengths("--turns", prompts.turns),
        think_s=think_s,
        limits=TraceLimits(
            scale=prompts.length_scale,
            max_input_tokens=prompts.max_input_tokens,
            max_output_tokens=prompts.max_output_tokens,
        ),
    )


def parse_target(service: ServiceFlags, prompts: PromptFlags, sent: GoalFlags | None = None) -> Target:
    """Return the service, with the targets that it is sent; that it speaks HTTP may be said by its URL alone."""
    default = Protocol.GRPC if service.url is None else Protocol.HTTP
    protocol = default if service.protocol is None else choose("--protocol", service.protocol, Protocol)
    addresses = {"--router": service.router, "--url": service.url}
    wanted, other = ("--router", "--url") if protocol is Protocol.GRPC else ("--url", "--router")
    if addresses[other] is not None:
        raise BenchConfigError(f"{other} is {addresses[other]!r}, and --protocol {protocol}; allowed with it: {wanted}")
    grpc, http = service.router or DEFAULT_ROUTER, service.url or DEFAULT_URL
    if "://" in grpc:
        raise BenchConfigError(f"--router is {grpc!r}; allowed: host:port, without a scheme")
    check_address("--router", grpc)
    if not _is_url(http):
        raise BenchConfigError(f"--url is {http!r}; allowed: http://HOST[:PORT]... or https://HOST[:PORT]...")
    is_plain = service.tls_ca is None if protocol is Protocol.GRPC else urlsplit(http).scheme == "http"
    tls_flags = {
        "--tls-ca": service.tls_ca,
        "--tls-cert": service.tls_cert,
        "--tls-key": service.tls_key,
        "--tls-name": service.tls_name,
    }
    for flag, value in tls_flags.items():
        if is_plain and value is not None:
            instead = "with --tls-ca" if protocol is Protocol.GRPC else "with an https:// URL"
            raise BenchConfigError(f"{flag} is {value!r}, and the connection is plain; allowed: {instead}")
    try:
        tls = ClientTls.from_flags(service.tls_cert, service.tls_key, service.tls_ca, service.tls_name)
    except RouterConfigError as error:
        raise BenchConfigError(str(error)) from error
    if service.api_key is not None and not (service.api_key.isascii() and service.api_key.isprintable()):
        raise BenchConfigError("--api-key has a line break, or another character; allowed: printable ASCII")
    if sent is not None and sent.ttft_target is None and sent.tpot_target is None:
        raise BenchConfigError("--send-targets: there is none; allowed: with --ttft-target, --tpot-target or both")
    return Target(
        protocol=protocol,
        address=grpc if protocol is Protocol.GRPC else http,
        model=service.model,
        api_key=service.api_key,
        tls=tls,
        timeout_s=service.timeout,
        temperature=prompts.temperature,
        top_k=prompts.top_k,
        top_p=prompts.top_p,
        repetition_penalty=prompts.repetition_penalty,
        ignore_eos=prompts.ignore_eos,
        target_ttft_s=_seconds(sent.ttft_target) if sent else None,
        target_tpot_s=_seconds(sent.tpot_target) if sent else None,
    )


def parse_loads(load: LoadFlags) -> tuple[Load, ...]:
    """Return open loops, closed loops, or a replay: one kind only."""
    kinds = {"--rate": load.rate is not None, "--concurrency": load.concurrency is not None, "--replay": load.replay}
    named = [flag for flag, is_given in kinds.items() if is_given]
    if len(named) > 1:
        raise BenchConfigError(f"{' and '.join(named)} are given; allowed: one of them")
    if load.replay:
        return (Replay(speed=load.speed),)
    if load.rate is not None:
        rates = _numbers("--rate", load.rate, float)
        return tuple(OpenLoop(rate=rate, burstiness=load.burstiness) for rate in rates)
    text = str(DEFAULT_CONCURRENCY) if load.concurrency is None else load.concurrency
    return tuple(ClosedLoop(concurrency=number) for number in _numbers("--concurrency", text, int))


def parse_targets(goals: GoalFlags) -> Targets | None:
    """Return what requests must keep for goodput; None: nobody asks."""
    targets = Targets(
        ttft_s=_seconds(goals.ttft_target), tpot_s=_seconds(goals.tpot_target), e2e_s=_seconds(goals.e2e_target)
    )
    return None if targets == Targets() else targets


def parse_peak(ranks: RankFlags) -> Peak:
    """Return what is known of the ranks' machines."""
    return Peak(
        read_bytes_per_s=None if ranks.peak_bandwidth is None else ranks.peak_bandwidth * 1e9,
        flops_per_s=None if ranks.peak_flops is None else ranks.peak_flops * 1e9,
    )


def find_control(ranks: RankFlags, target: Target) -> tuple[str, int | None]:
    """Return where the controller is, and the port its router must have; None: any, for its address was given."""
    if ranks.control is not None:
        return ranks.control, None
    url = urlsplit(target.address if "://" in target.address else f"grpc://{target.address}")
    router_port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return join_host_port(url.hostname or "", DEFAULT_CONTROL_PORT), router_port


def check_replay(loads: Iterable[Load], kind: DatasetKind) -> None:
    """Only a trace has times; that one without them is meant, shows when it is read."""
    if kind is not DatasetKind.TRACE and any(isinstance(load, Replay) for load in loads):
        raise BenchConfigError(f"--replay is given, and --dataset {kind} has no times; allowed: with --dataset trace")


def find_idle(kinds: Iterable[DatasetKind], *groups: PromptFlags | SessionFlags | LoadFlags) -> list[str]:
    """Return the flags that are given and that nothing looks at: no dataset of these kinds, and not the load."""
    flags = [name for group in groups for name in given(group)]
    idle = [name for name in flags if name in _LOOKED_AT and not {*kinds} & {*_LOOKED_AT[name]}]
    idle += [name for name, needed in _NEEDED.items() if name in flags and needed not in flags]
    return [f"--{name.replace('_', '-')}" for name in idle]


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # what the port, or an IPv6 address, raises
        return False


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _numbers(flag: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: a number, or several as in 1,4,16") from None
