"""The `weft` command. Each command imports what it needs when it runs, so that `weft status` costs no torch and no Ray.

Whatever goes wrong is one clear line on stderr: exit code 2 for a wrong flag or file, 1 for everything else.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bench.load.cli import app as bench_app
from cluster.cli_connection import with_control
from cluster.cli_operate import register
from cluster.defaults import DEFAULT_HOST
from cluster.errors import ClusterConfigError, ClusterError
from cluster.imports import import_for_good
from cluster.logs import LEVELS
from cluster.models import DEFAULT_MODEL
from parallel.errors import ModelError
from router.errors import RouterError
from workers.errors import EngineError

if TYPE_CHECKING:
    from cluster.control_client import ControlClient

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_ROUTER = f"{DEFAULT_HOST}:50051"

_Model = "Model"
_Cache = "Cache and batches"
_Network = "Network"


def main() -> None:
    """Run the command line."""
    logging.basicConfig(format="%(levelname).1s %(name)s: %(message)s")
    run_and_report(app)


def run_and_report(command: Callable[[], object]) -> None:
    """Run a command; tell its error in one line and exit with its code."""
    try:
        command()
    except ClusterConfigError as error:
        _fail(error, 2)
    except (ClusterError, ModelError, EngineError, RouterError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: Exception, code: int) -> None:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(code)


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib import metadata

        print(f"weft {metadata.version('weft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    """Serve large language models on a cluster, or on this machine."""


@app.command()
def serve(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL|FILE.yaml]", help="A model as in --model, or a YAML file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Folder in Hugging Face layout, hub id, or a packaged name. Default: {DEFAULT_MODEL}.",
            rich_help_panel=_Model,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.", rich_help_panel=_Model)] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tensor-parallel", "--tp", help="Ranks that share each layer.", rich_help_panel=_Model),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option("--pipeline-parallel", "--pp", help="Stages that share the layers.", rich_help_panel=_Model),
    ] = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--expert-parallel/--no-expert-parallel",
            "--ep/--no-ep",
            help="Divide experts over the tensor-parallel ranks, each whole.",
            rich_help_panel=_Model,
        ),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Replica groups.", rich_help_panel=_Model)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, float16 or bfloat16.", rich_help_panel=_Model)
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="none, or int8: linear layers in 8 bits.", rich_help_panel=_Model)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_Model)] = None,
    kernels: Annotated[
        str | None, typer.Option(help="auto, reference, cpu, cpu-native or cuda.", rich_help_panel=_Model)
    ] = None,
    attention_backend: Annotated[
        str | None,
        typer.Option(help="On CUDA: auto, flash-attention, flashinfer or triton.", rich_help_panel=_Model),
    ] = None,
    compile_layers: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the layers by torch's compiler.", rich_help_panel=_Model),
    ] = None,
    max_context: Annotated[int | None, typer.Option(help="Longest prompt plus output.", rich_help_panel=_Model)] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of each rank.", rich_help_panel=_Model)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences running at once.", rich_help_panel=_Cache)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step.", rich_help_panel=_Cache)
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one sequence in a step.", rich_help_panel=_Cache)
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan a step while the one before it runs; default: on a GPU.",
            rich_help_panel=_Cache,
        ),
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        typer.Option(
            help="Who is served first: fcfs, priority, deadline, shortest_remaining or mlfq.", rich_help_panel=_Cache
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.", rich_help_panel=_Cache)] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto, or int8: keys and values in 8 bits, on a CPU.", rich_help_panel=_Cache)
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks; default: what fits.", rich_help_panel=_Cache)
    ] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Of a GPU's memory, for everything.", rich_help_panel=_Cache)
    ] = None,
    cpu_cache_gb: Annotated[
        float | None, typer.Option(help="KV cache of each rank on a CPU, in GiB.", rich_help_panel=_Cache)
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Share equal prefixes.", rich_help_panel=_Cache),
    ] = None,
    host_cache_gb: Annotated[
        float | None,
        typer.Option(help="Host memory of each rank for evicted KV blocks, in GiB.", rich_help_panel=_Cache),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How a replica is chosen: round_robin, least_loaded, power_of_two or prefix_affinity.",
            rich_help_panel=_Network,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: loopback.", rich_help_panel=_Network)
    ] = None,
    port: Annotated[int | None, typer.Option(help="gRPC; 0: any.", rich_help_panel=_Network)] = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI HTTP; 0: any.", rich_help_panel=_Network)] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus of the router; 0: any.", rich_help_panel=_Network)
    ] = None,
    control_port: Annotated[int | None, typer.Option(help="Controller; 0: any.", rich_help_panel=_Network)] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help='Ray cluster to join ("auto": of this machine); default: a local one.', rich_help_panel=_Network
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Go on with the service that the Ray cluster has already.", rich_help_panel=_Network
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when READY, leave it running.")] = False,
    log_file: Annotated[Path | None, typer.Option(help="With --detach: where output goes.")] = None,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")] = "warning",
) -> None:
    """Serve a model, or what a YAML file says, until Ctrl-C or `weft stop`."""
    import_for_good("cluster.serve", "cluster.serve_settings")
    from cluster.config import build_spec
    from cluster.serve import serve as run_service
    from cluster.serve import serve_in_background
    from cluster.serve_settings import merge_settings

    if log_level not in LEVELS:
        raise ClusterConfigError(f"--log-level is {log_level!r}; allowed: {', '.join(LEVELS)}")
    flags = {
        "models[0].path": model,
        "models[0].name": name,
        "models[0].tensor_parallel": tensor_parallel,
        "models[0].pipeline_parallel": pipeline_parallel,
        "models[0].expert_parallel": expert_parallel,
        "models[0].replicas": replicas,
        "models[0].dtype": dtype,
        "models[0].quantization": quantization,
        "models[0].device": device,
        "models[0].kernels": kernels,
        "models[0].attention_backend": attention_backend,
        "models[0].compile": compile_layers,
        "models[0].max_context": max_context,
        "models[0].num_threads": num_threads,
        "models[0].scheduler.max_num_seqs": max_num_seqs,
        "models[0].scheduler.max_num_batched_tokens": max_num_batched_tokens,
        "models[0].scheduler.prefill_chunk_tokens": prefill_chunk_tokens,
        "models[0].scheduler.async_scheduling": async_scheduling,
        "models[0].scheduler.policy": scheduling_policy,
        "models[0].cache.block_size": block_size,
        "models[0].cache.dtype": kv_cache_dtype,
        "models[0].cache.num_blocks": num_blocks,
        "models[0].cache.memory_fraction": memory_fraction,
        "models[0].cache.cpu_cache_bytes": None if cpu_cache_gb is None else int(cpu_cache_gb * 2**30),
        "models[0].cache.enable_prefix_caching": prefix_caching,
        "models[0].cache.host_cache_bytes": None if host_cache_gb is None else int(host_cache_gb * 2**30),
        "router.policy": policy,
        "host": host,
        "router.port": port,
        "router.http_port": http_port,
        "router.metrics_port": metrics_port,
        "controller.port": control_port,
        "ray.address": ray_address,
    }
    settings = merge_settings(target, {path: value for path, value in flags.items() if value is not None})
    spec = build_spec(settings)
    if take_over and spec.ray_address is None:
        raise ClusterConfigError("--take-over: there is nothing on a Ray of its own; allowed: with --ray-address")
    if detach and spec.ray_address is None:
        serve_in_background(settings, Console(), log_level=log_level, log_file=log_file)
    else:
        run_service(spec, Console(), log_level=log_level, stays=not detach, takes_over=take_over)


@app.command()
@with_control
def status(
    client: "ControlClient",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show models, replica groups and routers."""
    from cluster.status_view import print_status, status_as_dict

    state = client.status()
    if as_json:
        print(json.dumps(status_as_dict(state), indent=2))
    else:
        print_status(Console(), state)


@app.command()
@with_control
def stop(
    client: "ControlClient",
    grace: Annotated[float, typer.Option(min=0, help="Seconds that requests in flight may take.")] = 10.0,
) -> None:
    """Stop the service: routers first, then replica groups, then the controller."""
    client.shut_down(grace)
    print("Stopped.")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    router: Annotated[str, typer.Option(help="host:port of the router's gRPC service.")] = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option(help="Default: the only model served.")] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", show_envvar=True, help="Where the router wants one.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Speak TLS to a router whose certificate these authorities signed (PEM).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = True,
    max_tokens: Annotated[int | None, typer.Option(help="At most this many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    presence_penalty: Annotated[float | None, typer.Option()] = None,
    frequency_penalty: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the text.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Send a prompt to a running service and print what comes back."""
    from cluster.generate import generate as run_generate

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
    }
    run_generate(
        sys.stdin.read() if prompt == "-" else prompt,
        router=router,
        api_key=api_key,
        tls_ca=tls_ca,
        model=model,
        is_chat=chat,
        system=system,
        stream=stream and not as_json,
        as_json=as_json,
        timeout_s=timeout,
        sampling={name: value for name, value in sampling.items() if value is not None},
    )


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    preset: Annotated[
        str | None, typer.Option(help="tiny, 110m, 1b, qwen2.5-0.5b or tiny-moe; single flags change it.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="llama, mistral, qwen2, mixtral, ...")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    layers: Annotated[int | None, typer.Option()] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option()] = None,
    inner: Annotated[int | None, typer.Option(help="Inner size of the MLP.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None,
    experts_per_token: Annotated[int | None, typer.Option()] = None,
    expert_inner: Annotated[int | None, typer.Option(help="Inner size of an expert.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    max_context: Annotated[int | None, typer.Option()] = None,
    tie_embeddings: Annotated[bool | None, typer.Option("--tie-embeddings/--no-tie-embeddings")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help=f"Folder whose tokenizer is copied; default: that of {DEFAULT_MODEL}.")
    ] = None,
) -> None:
    """Write a model with random weights, for benchmarks and tests."""
    from cluster.make_model import make_model as write_model

    write_model(
        folder,
        preset=preset,
        sizes={
            "model_type": family,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": expert_inner,
            "vocab_size": vocab,
            "max_position_embeddings": max_context,
            "tie_word_embeddings": tie_embeddings,
        },
        dtype=dtype,
        seed=seed,
        tokenizer=tokenizer,
    )


@app.command()
def demo(
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", min=1)] = 2,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")] = "warning",
) -> None:
    """Bring up a cluster on this machine, send it some prompts, show what happens, and stop it."""
    from cluster.demo import run_demo

    run_demo(replicas=replicas, tensor_parallel=tensor_parallel, console=Console(), log_level=log_level)


register(app)
app.add_typer(bench_app)

if __name__ == "__main__":
    main()
