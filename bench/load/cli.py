"""`weft bench`: its flags, and what they mean. What a command needs is imported when it runs."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.errors import BenchConfigError

app = typer.Typer(name="bench", help="Measure an engine or a running service.", no_args_is_help=True)

_LOAD, _DATA, _SERVICE, _OUTPUT = "Load", "Prompts", "Service", "Output"

Dataset = Annotated[
    str,
    typer.Option(
        help="random, shared-prefix, sessions, prompts, trace, or a workload: W1, W2, W3.",
        rich_help_panel=_DATA,
    ),
]
File = Annotated[
    Path | None, typer.Option(help="JSON lines, plain or .gz, of prompts or a trace.", rich_help_panel=_DATA)
]
InputTokens = Annotated[str, typer.Option(help="Of each prompt: a number, or 32-256.", rich_help_panel=_DATA)]
OutputTokens = Annotated[str, typer.Option(help="To generate: a number, or 16-128.", rich_help_panel=_DATA)]
PrefixTokens = Annotated[
    int, typer.Option(min=1, help="Shared by prompts (shared-prefix, sessions).", rich_help_panel=_DATA)
]
NumPrefixes = Annotated[int, typer.Option(min=1, help="How many different ones.", rich_help_panel=_DATA)]
Turns = Annotated[str, typer.Option(help="Calls of a session: a number, or 2-5.", rich_help_panel=_DATA)]
LengthScale = Annotated[float, typer.Option(help="Multiplies all lengths of a trace.", rich_help_panel=_DATA)]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Longer prompts of a trace are cut.", rich_help_panel=_DATA)]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Longer outputs of a trace are cut.", rich_help_panel=_DATA)]
Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=_DATA)]
Temperature = Annotated[float, typer.Option(min=0, help="0: greedy.", rich_help_panel=_DATA)]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Always generate to the full length.", rich_help_panel=_DATA),
]
TtftTarget = Annotated[float | None, typer.Option(help="For goodput: milliseconds.", rich_help_panel=_OUTPUT)]
TpotTarget = Annotated[float | None, typer.Option(help="For goodput: milliseconds.", rich_help_panel=_OUTPUT)]
Json = Annotated[
    Path | None, typer.Option("--json", help="Append one line of JSON to this file.", rich_help_panel=_OUTPUT)
]


@app.command()
def serve(
    protocol: Annotated[str, typer.Option(help="grpc or http.", rich_help_panel=_SERVICE)] = "grpc",
    router: Annotated[
        str, typer.Option(help="host:port of the router's gRPC service.", rich_help_panel=_SERVICE)
    ] = "127.0.0.1:50051",
    url: Annotated[
        str, typer.Option(help="With --protocol http: any OpenAI-compatible service.", rich_help_panel=_SERVICE)
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the only model served.", rich_help_panel=_SERVICE)] = "",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="WEFT_API_KEY", show_envvar=True, help="Where the service wants one.", rich_help_panel=_SERVICE
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities of the service's certificate (PEM): speak TLS.", rich_help_panel=_SERVICE),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of each request.", rich_help_panel=_SERVICE)] = 300.0,
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests a second. 1,2,4 is a sweep; inf: at once.", rich_help_panel=_LOAD),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="With --rate: gamma shape of the gaps. 1: Poisson; less: bursts; inf: even.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    replay: Annotated[
        bool, typer.Option("--replay", help="Open loop: as in the trace.", rich_help_panel=_LOAD)
    ] = False,
    speed: Annotated[float, typer.Option(help="With --replay: so many times as fast.", rich_help_panel=_LOAD)] = 1.0,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: requests at a time. 1,4,16 is a sweep. Default load: 8.", rich_help_panel=_LOAD
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", "-n", min=1, help="Of each load. Default: 100.", rich_help_panel=_LOAD),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds in which each load is sent.", rich_help_panel=_LOAD)
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, not counted.", rich_help_panel=_LOAD)] = 8,
    dataset: Dataset = "random",
    file: File = None,
    input_tokens: InputTokens = "128",
    output_tokens: OutputTokens = "64",
    prefix_tokens: PrefixTokens = 512,
    num_prefixes: NumPrefixes = 1,
    turns: Turns = "2-5",
    think_time: Annotated[
        float, typer.Option(min=0, help="Seconds between the calls of a session.", rich_help_panel=_DATA)
    ] = 0.0,
    length_scale: LengthScale = 1.0,
    max_input_tokens: MaxInput = None,
    max_output_tokens: MaxOutput = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Random ids are below it. Default: the model's; HTTP: 500.", rich_help_panel=_DATA),
    ] = None,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    seed: Seed = 0,
    ttft_target: TtftTarget = None,
    tpot_target: TpotTarget = None,
    json_file: Json = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loads into this folder (PNG).", rich_help_panel=_OUTPUT)
    ] = None,
) -> None:
    """Send load to a running service and report latencies, throughput and goodput."""
    from bench.load.flags import choose, parse_dataset, parse_loads, parse_targets
    from bench.load.plots import check_plots, plot_sweep
    from bench.load.progress import ServeProgress
    from bench.load.report import append_line, print_sweep, serve_line
    from bench.load.sender import Protocol, Target
    from bench.load.serve import ServeOptions, measure

    chosen = choose("--protocol", protocol, Protocol)
    data = parse_dataset(
        dataset,
        file,
        inputs=input_tokens,
        outputs=output_tokens,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        turns=turns,
        think_s=think_time,
        scale=length_scale,
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
    )
    if num_requests is None and duration is None and data.num_calls is None:
        num_requests = 100
    options = ServeOptions(
        target=Target(
            protocol=chosen,
            address=router if chosen is Protocol.GRPC else url,
            model=model,
            api_key=api_key,
            tls_ca=tls_ca,
            timeout_s=timeout,
            temperature=temperature,
            ignore_eos=ignore_eos,
        ),
        loads=parse_loads(rate=rate, burstiness=burstiness, concurrency=concurrency, replay=replay, speed=speed),
        dataset=data,
        num_requests=num_requests,
        duration_s=duration,
        num_warmup=warmup,
        vocab_size=vocab_size,
        targets=parse_targets(ttft_target, tpot_target),
        seed=seed,
    )
    if plot is not None:
        check_plots(plot)
    console = Console()
    with ServeProgress(console) as watcher:
        outcome = asyncio.run(measure(options, watcher))
    assert outcome.model is not None, "found before anything is measured"
    print_sweep(console, outcome.points)
    if json_file is not None:
        append_line(serve_line(options, outcome), json_file)
    if plot is not None:
        title = f"{outcome.model.name} over {chosen}, {data.kind} prompts"
        console.print(f"Plot: {plot_sweep(outcome.points, plot, title=title)}")


@app.command()
def offline(
    model: Annotated[
        str,
        typer.Option(help="llama-110m or qwen2.5-0.5b (random weights, made once), a folder, or a hub id."),
    ] = "llama-110m",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, or int8: linear layers in 8 bits.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or int8: keys and values in 8 bits.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="dotted.path=value, as in a model's section of a cluster file; may be repeated."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="W1, W2 or W3; may be repeated. Default: all three.", rich_help_panel=_DATA),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="In place of workloads: random, shared-prefix, sessions, prompts or trace.", rich_help_panel=_DATA
        ),
    ] = None,
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, help="Of a dataset.", rich_help_panel=_DATA)
    ] = 32,
    file: File = None,
    input_tokens: InputTokens = "128",
    output_tokens: OutputTokens = "64",
    prefix_tokens: PrefixTokens = 512,
    num_prefixes: NumPrefixes = 1,
    turns: Turns = "2-5",
    length_scale: LengthScale = 1.0,
    max_input_tokens: MaxInput = None,
    max_output_tokens: MaxOutput = None,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="After one round to warm up.")] = 3,
    ttft_target: TtftTarget = None,
    tpot_target: TpotTarget = None,
    json_file: Json = None,
) -> None:
    """Run the engine in this process, all requests at once, and report speed beside what this machine can."""
    from bench.load.flags import parse_dataset, parse_targets
    from bench.load.offline import OfflineOptions, measure_offline
    from bench.load.progress import OfflineProgress
    from bench.load.report import append_line, offline_line, print_offline
    from cluster.operate import parse_settings

    if dataset is not None and workload:
        raise BenchConfigError("--workload and --dataset are both given; allowed: one of them")
    datasets = tuple(
        parse_dataset(
            name,
            file,
            inputs=input_tokens,
            outputs=output_tokens,
            prefix_tokens=prefix_tokens,
            num_prefixes=num_prefixes,
            turns=turns,
            think_s=0.0,
            scale=length_scale,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
        )
        for name in ([dataset] if dataset is not None else workload or ["W1", "W2", "W3"])
    )
    flags = {"dtype": dtype, "quantization": quantization, "device": device, "num_threads": threads}
    options = OfflineOptions(
        model=model,
        settings={**flags, **parse_settings([f"cache.dtype={kv_cache_dtype}", *(settings or [])])},
        datasets=datasets,
        num_requests=num_requests,
        repeats=repeats,
        temperature=temperature,
        ignore_eos=ignore_eos,
        targets=parse_targets(ttft_target, tpot_target),
        seed=seed,
    )
    console = Console()
    with OfflineProgress(console) as watcher:
        result = measure_offline(options, watcher)
    print_offline(console, result)
    if json_file is not None:
        append_line(offline_line(options, result), json_file)
