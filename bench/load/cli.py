"""`weft bench`: its commands, `weft simulate` and `weft replay`. What a command needs is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.errors import BenchConfigError, BenchError
from bench.load.flag_groups import (
    ClusterFlags,
    GoalFlags,
    Json,
    LoadFlags,
    PromptFlags,
    RankFlags,
    ServiceFlags,
    SessionFlags,
    of_output,
    of_prompts,
)
from cluster.cli_flags import WholeNamesCommand, given, with_flags

app = typer.Typer(name="bench", help="Measure an engine or a running service.", no_args_is_help=True)


@app.command(cls=WholeNamesCommand)
@with_flags
def serve(
    *,
    service: ServiceFlags,
    ranks: RankFlags,
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
    """Send load to a running service and report latencies, throughput, goodput and how well machines are used."""
    from bench.load.flags import find_idle, parse_dataset, parse_loads, parse_peak, parse_target, parse_targets
    from bench.load.serve import ServeOptions
    from bench.load.serve_command import run_serve

    is_bounded = load.num_requests is not None or load.duration is not None
    data = parse_dataset(dataset, prompts, think_s=sessions.think_time, is_bounded=is_bounded)
    options = ServeOptions(
        target=parse_target(service, prompts, goals if sessions.send_targets else None),
        loads=parse_loads(load),
        dataset=data,
        num_requests=load.num_requests if is_bounded or data.num_calls is not None else 100,
        duration_s=load.duration,
        num_warmup=load.warmup,
        vocab_size=sessions.vocab_size,
        targets=parse_targets(goals),
        seed=prompts.seed,
        peak=parse_peak(ranks),
    )
    idle = find_idle([data.kind], prompts, sessions, load)
    run_serve(options, ranks, idle=idle, json_file=json_file, plot=plot)


@app.command(cls=WholeNamesCommand)
@with_flags
def offline(
    *,
    model: Annotated[
        str,
        typer.Option(help="llama-110m, qwen2.5-0.5b or llama3-8b (random weights, made once), a folder, or a hub id."),
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
    num_requests: Annotated[
        int | None,
        of_prompts("--num-requests", "-n", min=1, help="Of a dataset. Default: 32, or all where a file has fewer."),
    ] = None,
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
        datasets=parse_datasets(workload or [], dataset, prompts, is_bounded=num_requests is not None),
        num_requests=num_requests or 32,
        repeats=repeats,
        temperature=prompts.temperature,
        top_k=prompts.top_k or 0,
        top_p=1.0 if prompts.top_p is None else prompts.top_p,
        repetition_penalty=1.0 if prompts.repetition_penalty is None else prompts.repetition_penalty,
        ignore_eos=prompts.ignore_eos,
        targets=parse_targets(goals),
        seed=prompts.seed,
    )
    console = Console()
    idle = find_idle([each.kind for each in options.datasets], prompts)
    if num_requests is not None and all(each.num_calls is not None for each in options.datasets):
        idle.append("--num-requests")
    warn_idle(console, idle)
    if json_file is not None:
        check_line_file(json_file)
    with OfflineProgress(console) as watcher:
        result = measure_offline(options, watcher)
    print_offline(console, model, result)
    if json_file is not None:
        append_line(offline_line(options, result), json_file)
    if result.ended_by:
        raise BenchError(f"ended before the last workload: {result.ended_by}")


@with_flags
def simulate(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines, plain or .gz, as --dataset trace of bench. Default: made by seed.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 2000,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Requests a second. Default: the trace's; else 8, or 2 a replica."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Of the scheduler: names, with commas. Default: all; in a cluster: fcfs.")
    ] = None,
    num_seqs: Annotated[int, typer.Option(min=1, help="Sequences running at once.")] = 32,
    num_blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 16 tokens, or --block-size.")] = 8000,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 2048,
    promote_after: Annotated[float, typer.Option(min=0, help="Seconds.")] = 60.0,
    deadlines: Annotated[
        bool, typer.Option("--deadlines", help="Requests have one: 2, 5 or 20 times their time alone, and 2 s.")
    ] = False,
    step_ms: Annotated[float, typer.Option(min=0, help="Of each step.")] = 8.0,
    token_us: Annotated[float, typer.Option(min=0, help="Of each token in it.")] = 50.0,
    context_ns: Annotated[float, typer.Option(min=0, help="Of each token that one of these sees.")] = 40.0,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    cluster: ClusterFlags,
) -> None:
    """Compare scheduling policies of a replica, or routing policies of a cluster, in virtual time.

    Scheduler, policies and autoscaler are the real ones; steps take what a formula says.
    """
    from bench.simulate import ALL_POLICIES, Options, StepCost, parse_policies
    from bench.simulate import simulate as simulate_replica

    options = Options(
        trace=trace,
        num_requests=requests,
        rate=rate,
        policies=parse_policies(policy or (ALL_POLICIES if cluster.replicas is None else "fcfs")),
        num_seqs=num_seqs,
        num_blocks=num_blocks,
        batched_tokens=batched_tokens,
        promote_after_s=promote_after,
        has_deadlines=deadlines,
        cost=StepCost(step_s=step_ms / 1e3, token_s=token_us / 1e6, context_token_s=context_ns / 1e9),
        seed=seed,
    )
    if cluster.replicas is None:
        if idle := given(cluster):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
            raise BenchConfigError(f"{names}: allowed with --replicas")
        simulate_replica(options)
    else:
        from bench.simulate_cluster import parse_cluster, simulate_cluster

        simulate_cluster(parse_cluster(options, cluster))


def replay(
    *,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Recordings, or folders of them.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Decide again what `weft serve --record-decisions` recorded; exit code 1 where a decision is another one."""
    from bench.replay import replay as run_replay

    run_replay(files, as_json=as_json)
