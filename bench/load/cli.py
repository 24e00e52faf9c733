"""`weft bench`: its commands. What a command needs is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.load.flag_groups import (
    GoalFlags,
    Json,
    LoadFlags,
    PromptFlags,
    ServiceFlags,
    SessionFlags,
    of_output,
    of_prompts,
)
from cluster.cli_flags import with_flags

app = typer.Typer(name="bench", help="Measure an engine or a running service.", no_args_is_help=True)


@app.command()
@with_flags
def serve(
    *,
    service: ServiceFlags,
    load: LoadFlags,
    dataset: Annotated[
        str, of_prompts(help="random, shared-prefix, sessions, prompts, trace, or a workload: W1, W2, W3.")
    ] = "random",
    prompts: PromptFlags,
    sessions: SessionFlags,
    goals: GoalFlags,
    json_file: Json = None,
    plot: Annotated[Path | None, of_output(help="Draw the loads into this folder (PNG).")] = None,
) -> None:
    """Send load to a running service and report latencies, throughput and goodput."""
    from bench.load.flags import find_idle, parse_dataset, parse_loads, parse_target, parse_targets
    from bench.load.serve import ServeOptions
    from bench.load.serve_command import run_serve

    data = parse_dataset(dataset, prompts, think_s=sessions.think_time)
    is_endless = load.num_requests is None and load.duration is None and data.num_calls is None
    options = ServeOptions(
        target=parse_target(service, prompts),
        loads=parse_loads(load),
        dataset=data,
        num_requests=100 if is_endless else load.num_requests,
        duration_s=load.duration,
        num_warmup=load.warmup,
        vocab_size=sessions.vocab_size,
        targets=parse_targets(goals),
        seed=prompts.seed,
    )
    idle = find_idle([data.kind], prompts, sessions, load)
    run_serve(options, idle=idle, json_file=json_file, plot=plot)


@app.command()
@with_flags
def offline(
    *,
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
    workload: Annotated[list[str] | None, of_prompts(help="W1, W2 or W3; may be repeated. Default: all three.")] = None,
    dataset: Annotated[
        str | None, of_prompts(help="In place of workloads: random, shared-prefix, sessions, prompts or trace.")
    ] = None,
    num_requests: Annotated[int, of_prompts("--num-requests", "-n", min=1, help="Of a dataset.")] = 32,
    prompts: PromptFlags,
    repeats: Annotated[int, typer.Option(min=1, help="After one round to warm up.")] = 3,
    goals: GoalFlags,
    json_file: Json = None,
) -> None:
    """Run the engine in this process, all requests at once, and report speed beside what this machine can."""
    from bench.load.flags import find_idle, parse_datasets, parse_targets
    from bench.load.offline import OfflineOptions, measure_offline
    from bench.load.progress import OfflineProgress
    from bench.load.report import append_line, check_line_file, offline_line, print_offline, warn_idle
    from cluster.operate import parse_settings

    flags = {"dtype": dtype, "quantization": quantization, "device": device, "num_threads": threads}
    options = OfflineOptions(
        model=model,
        settings={**flags, **parse_settings([f"cache.dtype={kv_cache_dtype}", *(settings or [])])},
        datasets=parse_datasets(workload or [], dataset, prompts),
        num_requests=num_requests,
        repeats=repeats,
        temperature=prompts.temperature,
        ignore_eos=prompts.ignore_eos,
        targets=parse_targets(goals),
        seed=prompts.seed,
    )
    console = Console()
    warn_idle(console, find_idle([each.kind for each in options.datasets], prompts))
    if json_file is not None:
        check_line_file(json_file)
    with OfflineProgress(console) as watcher:
        result = measure_offline(options, watcher)
    print_offline(console, model, result)
    if json_file is not None:
        append_line(offline_line(options, result), json_file)
