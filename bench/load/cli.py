"""`weft bench`: its commands, `weft simulate` and `weft replay`. What a command needs is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from bench.errors import BenchConfigError
from bench.load.flag_groups import (
    ClusterFlags,
    GoalFlags,
    Json,
    LoadFlags,
    OfflineFlags,
    PromptFlags,
    RankFlags,
    ServiceFlags,
    SessionFlags,
    SimulateFlags,
    of_output,
    of_prompts,
)
from cluster.cli_flags import WholeNamesCommand, given, with_flags
from cluster.imports import import_for_good

app = typer.Typer(name="bench", help="Measure an engine or a running service.", no_args_is_help=True)


@app.command(cls=WholeNamesCommand)
@with_flags
def serve(
    *,
    service: ServiceFlags,
    ranks: RankFlags,
    load: LoadFlags,
    dataset: Annotated[
        str, of_prompts(help="random, shared-prefix, sessions, prompts, trace, or a workload: W1 to W4.")
    ] = "random",
    prompts: PromptFlags,
    sessions: SessionFlags,
    goals: GoalFlags,
    json_file: Json = None,
    plot: Annotated[Path | None, of_output(help="Draw the loads into this folder (PNG).")] = None,
) -> None:
    """Send load to a running service and report latencies, throughput, goodput and how well machines are used."""
    from bench.load.flags import (
        check_replay,
        find_idle,
        parse_dataset,
        parse_loads,
        parse_peak,
        parse_target,
        parse_targets,
    )
    from bench.load.serve_command import run_serve
    from bench.load.serve_values import ServeOptions

    is_bounded = load.num_requests is not None or load.duration is not None
    data = parse_dataset(dataset, prompts, think_s=sessions.think_time, is_bounded=is_bounded)
    options = ServeOptions(
        target=parse_target(service, prompts, goals if sessions.send_targets else None),
        loads=parse_loads(load),
        dataset=data,
        num_requests=load.num_requests if is_bounded or data.is_workload else 100,
        duration_s=load.duration,
        num_warmup=load.warmup,
        vocab_size=sessions.vocab_size,
        targets=parse_targets(goals),
        seed=prompts.seed,
        peak=parse_peak(ranks),
    )
    check_replay(options.loads, data.kind)
    idle = find_idle([data.kind], prompts, sessions, load)
    run_serve(options, ranks, idle=idle, json_file=json_file, plot=plot)


@app.command(cls=WholeNamesCommand)
@with_flags
def offline(*, engine: OfflineFlags, prompts: PromptFlags, goals: GoalFlags, json_file: Json = None) -> None:
    """Run the engine in this process, all requests at once, and report speed beside what this machine can."""
    import_for_good("bench.load.offline_command")
    from bench.load.offline_command import run_offline

    run_offline(engine, prompts, goals, json_file=json_file)


@with_flags
def simulate(*, replica: SimulateFlags, cluster: ClusterFlags, json_file: Json = None) -> None:
    """Compare scheduling policies of a replica, or routing policies of a cluster, in virtual time.

    Scheduler, policies and autoscaler are the real ones; steps take what a formula says.
    """
    from bench.simulation.scheduling_policies import ALL_POLICIES, Options, parse_policies
    from bench.simulation.scheduling_policies import simulate as simulate_replica
    from bench.simulation.step_cost import StepCost

    cost = StepCost(
        step_s=replica.step_ms / 1e3, token_s=replica.token_us / 1e6, context_token_s=replica.context_ns / 1e9
    )
    options = Options(
        trace=replica.trace,
        num_requests=replica.requests,
        rate=replica.rate,
        policies=parse_policies(replica.policy or (ALL_POLICIES if cluster.replicas is None else "fcfs")),
        num_seqs=replica.num_seqs,
        num_blocks=replica.num_blocks,
        num_stages=replica.pipeline_parallel,
        batched_tokens=replica.batched_tokens,
        promote_after_s=replica.promote_after,
        has_deadlines=replica.deadlines,
        cost=cost,
        seed=replica.seed,
    )
    if cluster.replicas is None:
        if idle := given(cluster):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
            raise BenchConfigError(f"{names}: allowed with --replicas")
        simulate_replica(options, json_file=json_file)
    else:
        from bench.simulation.routing_policies import parse_cluster, simulate_cluster

        simulate_cluster(parse_cluster(options, cluster), json_file=json_file)


def replay(
    *,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Recordings, or folders of them.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Decide again what `weft serve --record-decisions` recorded; exit code 1 where a decision is another one."""
    from bench.simulation.replay import replay as run_replay

    run_replay(files, as_json=as_json)
