"""The flags of `weft bench` and `weft simulate`, by what they are about. No import here costs anything.

flags.py, offline_command.py and the simulator say what they mean.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from weft.limits import MAX_TEMPERATURE, MAX_TIMEOUT_S

from router.tls import INNER_NAME

DEFAULT_ROUTER = "127.0.0.1:50051"
MAX_COST = 1e9
"""The most that a part of a simulated step takes, in the unit of its flag; far above, sums are infinite."""
DEFAULT_URL = "http://127.0.0.1:8000"

of_load = partial(typer.Option, rich_help_panel="Load")
of_prompts = partial(typer.Option, rich_help_panel="Prompts")
of_service = partial(typer.Option, rich_help_panel="Service")
of_cluster = partial(typer.Option, rich_help_panel="Cluster")
of_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """Which service is measured."""

    protocol: Annotated[str | None, of_service(help="grpc or http. Default: grpc; with --url: http.")] = None
    router: Annotated[
        str | None, of_service(help=f"host:port of the router's gRPC service. Default: {DEFAULT_ROUTER}.")
    ] = None
    url: Annotated[
        str | None, of_service(help=f"Any OpenAI-compatible service, over HTTP. Default: {DEFAULT_URL}.")
    ] = None
    model: Annotated[str, of_service(help="Model to ask. Default: the only one served.")] = ""
    api_key: Annotated[
        str | None, of_service(envvar="WEFT_API_KEY", show_envvar=True, help="API key, where the service wants one.")
    ] = None
    tls_ca: Annotated[
        str | None, of_service(metavar="PEM", help="Authorities of the service's certificate: speak TLS.")
    ] = None
    tls_cert: Annotated[
        str | None, of_service(metavar="PEM", help="A client's certificate chain, where the service wants one.")
    ] = None
    tls_key: Annotated[str | None, of_service(metavar="PEM", help="Key of that certificate.")] = None
    tls_name: Annotated[
        str | None, of_service(help="Name in the service's certificate. Default: that of the address.")
    ] = None
    timeout: Annotated[float, of_service(min=0.1, max=MAX_TIMEOUT_S, help="Limit of each request, in seconds.")] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlags:
    """Where to learn what the service's ranks do, and what their machines can."""

    control: Annotated[
        str | None,
        of_service(
            envvar="WEFT_CONTROL",
            help="host:port of Weft's controller. Default: port 50050 on the host of the service.",
        ),
    ] = None
    control_tls_cert: Annotated[
        Path | None,
        of_service(
            envvar="WEFT_CONTROL_TLS_CERT",
            metavar="PEM",
            help="Where the cluster has inner_tls: an operator's certificate chain.",
        ),
    ] = None
    control_tls_key: Annotated[
        Path | None, of_service(envvar="WEFT_CONTROL_TLS_KEY", metavar="PEM", help="Key of that certificate.")
    ] = None
    control_tls_ca: Annotated[
        Path | None, of_service(envvar="WEFT_CONTROL_TLS_CA", metavar="PEM", help="The cluster's authorities.")
    ] = None
    control_tls_name: Annotated[
        str, of_service(envvar="WEFT_CONTROL_TLS_NAME", help="Name in the cluster's certificates.")
    ] = INNER_NAME
    peak_bandwidth: Annotated[
        float | None,
        of_output(
            min=1e-3,
            max=1e9,
            help="GB/s of a GPU's memory, or a CPU node's. Default: measured, where ranks are on CPUs here.",
        ),
    ] = None
    peak_flops: Annotated[
        float | None,
        of_output(
            min=1e-3,
            max=1e9,
            help="GFLOP/s of a GPU, or a CPU node's. Default: as for --peak-bandwidth.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """When requests are sent."""

    rate: Annotated[
        str | None,
        of_load(help="Open loop: requests (of --dataset sessions: sessions) a second. 1,2,4 is a sweep; inf: at once."),
    ] = None
    burstiness: Annotated[
        float, of_load(help="With --rate: gamma shape of the gaps. 1: Poisson; less: bursts; inf: even.")
    ] = 1.0
    replay: Annotated[bool, of_load("--replay", help="Open loop: send at the times of the trace.")] = False
    speed: Annotated[float, of_load(help="With --replay: so many times as fast.")] = 1.0
    concurrency: Annotated[
        str | None, of_load(help="Closed loop: requests at a time. 1,4,16 is a sweep. Default load: 8.")
    ] = None
    num_requests: Annotated[
        int | None,
        of_load(
            "--num-requests", "-n", min=1, help="Requests of each load. Default: 100, or all where a file has fewer."
        ),
    ] = None
    duration: Annotated[float | None, of_load(min=0.1, help="Seconds in which each load is sent.")] = None
    warmup: Annotated[int, of_load(min=0, help="Requests sent before, not counted.")] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """What is sent, of a service and of an engine in this process."""

    file: Annotated[
        Path | None,
        of_prompts(help="JSON lines, plain or .gz, of prompts (sent again where more are asked for) or a trace."),
    ] = None
    input_tokens: Annotated[str, of_prompts(help="Tokens of each prompt: a number, or 32-256.")] = "128"
    output_tokens: Annotated[str, of_prompts(help="Tokens to generate: a number, or 16-128.")] = "64"
    prefix_tokens: Annotated[int, of_prompts(min=1, help="Tokens that prompts share (shared-prefix, sessions).")] = 512
    num_prefixes: Annotated[int, of_prompts(min=1, help="How many different prefixes.")] = 1
    turns: Annotated[str, of_prompts(help="Calls of a session: a number, or 2-5.")] = "2-5"
    length_scale: Annotated[float, of_prompts(help="Multiplies all lengths of a trace.")] = 1.0
    max_input_tokens: Annotated[int | None, of_prompts(min=1, help="Longer prompts of a trace are cut.")] = None
    max_output_tokens: Annotated[int | None, of_prompts(min=1, help="Longer outputs of a trace are cut.")] = None
    temperature: Annotated[float, of_prompts(min=0, max=MAX_TEMPERATURE, help="0: greedy.")] = 0.0
    top_k: Annotated[int | None, of_prompts(min=0, help="0: off. Default: as the service has it, else off.")] = None
    top_p: Annotated[float | None, of_prompts(min=1e-6, max=1, help="1: off. Default: as for --top-k.")] = None
    repetition_penalty: Annotated[
        float | None, of_prompts(min=1e-6, max=1e6, help="1: off. Default: as for --top-k.")
    ] = None
    ignore_eos: Annotated[
        bool, of_prompts("--ignore-eos/--no-ignore-eos", help="Always generate to the full length.")
    ] = True
    seed: Annotated[int, of_prompts(help="Seed of prompts and arrivals.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFlags:
    """What only a service is sent."""

    think_time: Annotated[
        float, of_prompts(min=0, max=MAX_TIMEOUT_S, help="Seconds between the calls of a session.")
    ] = 0.0
    vocab_size: Annotated[
        int | None, of_prompts(min=1, help="Random ids are below it. Default: the model's; HTTP: 500.")
    ] = None
    send_targets: Annotated[
        bool,
        of_output(
            "--send-targets", help="Send the TTFT and TPOT targets with each request: the router counts by them."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalFlags:
    """What requests must keep for goodput."""

    ttft_target: Annotated[float | None, of_output(help="For goodput: milliseconds to the first token.")] = None
    tpot_target: Annotated[float | None, of_output(help="For goodput: milliseconds for each further token.")] = None
    e2e_target: Annotated[float | None, of_output(help="For goodput: milliseconds to the last token.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFlags:
    """The engine of `weft bench offline`, and what it is measured with."""

    model: Annotated[
        str,
        typer.Option(
            help="llama-110m, qwen2.5-0.5b, qwen3-moe-0.5b or llama3-8b (random weights), a folder, or a hub id."
        ),
    ] = "llama-110m"
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto"
    quantization: Annotated[str, typer.Option(help="none, or int8: linear layers in 8 bits.")] = "none"
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or int8: keys and values in 8 bits.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="dotted.path=value, as in a model's section of a cluster file; may be repeated."),
    ] = None
    workload: Annotated[list[str] | None, of_prompts(help="W1 to W4; may be repeated. Default: W1, W2, W3.")] = None
    dataset: Annotated[
        str | None, of_prompts(help="In place of workloads: random, shared-prefix, sessions, prompts or trace.")
    ] = None
    num_requests: Annotated[
        int | None,
        of_prompts(
            "--num-requests", "-n", min=1, help="Requests of a dataset. Default: 32, or all where a file has fewer."
        ),
    ] = None
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds, after one to warm up.")] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags:
    """The replicas of `weft simulate`, and the requests that they get."""

    trace: Annotated[
        Path | None, typer.Option(help="JSON lines, plain or .gz, as --dataset trace of bench. Default: made by seed.")
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 2000
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Requests a second. Default: the trace's; else 8, or 2 a replica."),
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="Scheduling policies, with commas. Default: all; in a cluster: fcfs.")
    ] = None
    num_seqs: Annotated[int, typer.Option(min=1, help="Sequences running at once.")] = 32
    num_blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 16 tokens, or --block-size.")] = 8000
    pipeline_parallel: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel", "--pp", min=1, max=1024, help="Stages: each takes an equal part of a step."
        ),
    ] = 1
    batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 2048
    promote_after: Annotated[float, typer.Option(min=0, help="Seconds of waiting, then a request goes first.")] = 60.0
    deadlines: Annotated[
        bool, typer.Option("--deadlines", help="Requests have one: 2, 5 or 20 times their time alone, and 2 s.")
    ] = False
    step_ms: Annotated[float, typer.Option(min=0, max=MAX_COST, help="Milliseconds of each step.")] = 8.0
    token_us: Annotated[float, typer.Option(min=0, max=MAX_COST, help="Microseconds of each token in a step.")] = 50.0
    context_ns: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_COST,
            help="Nanoseconds of each token of which a request reads keys and values in a step.",
        ),
    ] = 40.0
    seed: Annotated[int, typer.Option(help="Seed of all that is random.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """The cluster of `weft simulate`, in place of one replica."""

    replicas: Annotated[
        int | None, of_cluster(min=1, help="Simulate routers over so many, and compare routing policies.")
    ] = None
    router_policy: Annotated[str, of_cluster(help="Routing policies, with commas.")] = (
        "round_robin,least_loaded,power_of_two,prefix_affinity"
    )
    routers: Annotated[int, of_cluster(min=1, help="Routers in front of the replicas; each gets as many requests.")] = 1
    autoscale: Annotated[str | None, of_cluster(help="least:most replicas. Default: their number stays.")] = None
    target_requests: Annotated[float, of_cluster(min=0.01, help="With --autoscale: requests of a replica.")] = 32.0
    upscale_delay: Annotated[float, of_cluster(min=0, help="With --autoscale: seconds before replicas are added.")] = (
        15.0
    )
    downscale_delay: Annotated[float, of_cluster(min=0, help="With --autoscale: seconds before replicas go.")] = 300.0
    start_time: Annotated[float, of_cluster(min=0, help="Seconds until a new replica is READY.")] = 30.0
    fail: Annotated[
        list[str] | None, of_cluster(help="seconds:replica, from 0: it dies then, and starts anew. May be repeated.")
    ] = None
    max_in_flight: Annotated[int, of_cluster(min=1, help="Requests of each router that replicas work on.")] = 1024
    network_ms: Annotated[
        float, of_cluster(min=0, max=MAX_COST, help="Milliseconds between router and replica, one way.")
    ] = 0.2
    block_size: Annotated[int, of_cluster(min=1, help="Tokens of a KV block.")] = 16
    length_scale: Annotated[float, of_cluster(help="Multiplies all lengths of a trace.")] = 1.0
    copies: Annotated[
        int, of_cluster(min=1, help="Copies of the trace, side by side, each with prompts of its own.")
    ] = 1


Json = Annotated[Path | None, of_output("--json", help="Append one line of JSON to this file.")]
