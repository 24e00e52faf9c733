"""The `weft` command. Each command imports what it needs when it runs, so that `weft status` costs no torch and no Ray.

Whatever goes wrong is one clear line on stderr: exit code 2 for a wrong flag or file, 1 for everything else.
"""

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from weft.limits import MAX_TIMEOUT_S

from bench.load.cli import app as bench_app
from bench.load.cli import replay, simulate
from cluster.cli_connection import RouterFlags, with_control
from cluster.cli_flags import WholeNamesCommand, given, read_object, with_flags
from cluster.cli_operate import register
from cluster.errors import ClusterConfigError, ClusterError, ServiceStoppedError
from cluster.imports import import_for_good
from cluster.logs import LEVELS
from cluster.models import DEFAULT_MODEL
from cluster.request_flags import RequestFlags
from cluster.serve_flags import CacheFlags, ModelFlags, NetworkFlags, settings_of
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

LogLevel = Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")]
Model = Annotated[str, typer.Option(help="Model to ask. Default: the only one served.")]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Variables for the chat template, such as {"enable_thinking": false}.'),
]
Timeout = Annotated[float, typer.Option(min=0.1, max=MAX_TIMEOUT_S, help="Give up after so many seconds.")]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of an output that takes no more: the disk is full, or what this user may have of it is."""


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    logging.basicConfig(format="%(levelname).1s %(name)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):  # which, in a locale that is no UTF-8, would raise; stderr never does
        sys.stdout.reconfigure(errors="backslashreplace")
    run_and_report(_run)


def _open_closed_streams() -> None:
    """Read nothing from, and lose what is written to, streams that a shell has closed (`2>&-`).

    Python has None for these, of which nobody can read, and `print` writes to stdout in place of a stderr that is None.
    """
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _run() -> None:
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError as error:  # no message to a controller or a router could hold it
            seen, encoding = os.fsencode(argument), sys.getfilesystemencoding()
            if encoding != "utf-8":  # the argument may well be UTF-8
                raise ClusterConfigError(
                    f"the argument {seen!r} is no text in this locale's encoding, {encoding}; allowed: a locale of "
                    "UTF-8, such as LC_ALL=C.UTF-8"
                ) from error
            raise ClusterConfigError(f"the argument {seen!r} is no UTF-8; allowed: names and paths that are") from error
    app()


def run_and_report(command: Callable[[], object]) -> None:
    """Run a command; tell its error in one line and exit with its code."""
    try:
        command()
    except ServiceStoppedError as error:
        print(error, file=sys.stderr)  # what was watched has come to its end, and nothing is wrong
    except ClusterConfigError as error:
        _fail(error, 2)
    except (ClusterError, ModelError, EngineError, RouterError) as error:
        _fail(error, 1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)  # as shells say that SIGINT ended a command


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


@app.command(cls=WholeNamesCommand)
@with_flags
def serve(
    *,
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL|FILE.yaml]", help="A model as in --model, or a YAML file.")
    ] = None,
    model: ModelFlags,
    cache: CacheFlags,
    network: NetworkFlags,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when READY, leave it running.")] = False,
    log_file: Annotated[Path | None, typer.Option(help="With --detach, on a local Ray: where output goes.")] = None,
    log_level: LogLevel = "warning",
) -> None:
    """Serve a model, or what a YAML file says, until Ctrl-C or `weft stop`."""
    import_for_good("cluster.detach", "cluster.serve_settings")
    from cluster.config import build_spec
    from cluster.detach import serve_in_background
    from cluster.serve import serve as run_service
    from cluster.serve_settings import merge_settings

    if log_level not in LEVELS:
        raise ClusterConfigError(f"--log-level is {log_level!r}; allowed: {', '.join(LEVELS)}")
    settings = merge_settings(target, settings_of(model, cache, network))
    spec = build_spec(settings)
    if network.take_over and spec.ray_address is None:
        raise ClusterConfigError("--take-over: a local Ray has no service to take over; allowed: with --ray-address")
    goes_to_background = detach and spec.ray_address is None
    if log_file is not None and not goes_to_background:
        raise ClusterConfigError("--log-file: nothing would be written there; allowed: with --detach, on a local Ray")
    if goes_to_background:
        serve_in_background(settings, Console(), log_level=log_level, log_file=log_file)
    else:
        run_service(spec, Console(), log_level=log_level, stays=not detach, takes_over=network.take_over)


@app.command()
@with_control
def status(
    client: "ControlClient",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show models, replica groups and routers."""
    from cluster.status_view import print_status, status_as_dict, tables_console

    state = client.status()
    if as_json:
        print(json.dumps(status_as_dict(state), indent=2))
    else:
        print_status(tables_console(), state)


@app.command()
@with_control
def stop(
    client: "ControlClient",
    grace: Annotated[
        float, typer.Option(min=0, max=MAX_TIMEOUT_S, help="Seconds that requests in flight may take.")
    ] = 10.0,
) -> None:
    """Stop the service: routers first, then replica groups, then the controller."""
    from cluster.operate import stop_service

    stop_service(client, grace)
    print("Stopped.")


@app.command(cls=WholeNamesCommand)
@with_flags
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    service: RouterFlags,
    model: Model = "",
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    chat_template_kwargs: TemplateKwargs = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = True,
    request: RequestFlags,
    timeout: Timeout = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Send a prompt to a running service and print what comes back."""
    from cluster.generate import generate as run_generate

    if system is not None and not chat:
        raise ClusterConfigError("--system: a plain prompt has no system message; allowed: with --chat")
    if chat_template_kwargs is not None and not chat:
        raise ClusterConfigError("--chat-template-kwargs: a plain prompt has no chat template; allowed: with --chat")
    if request.logprobs is not None and not as_json:
        raise ClusterConfigError("--logprobs: plain output does not show them; allowed: with --json")
    options = given(request)
    if chat_template_kwargs is not None:
        options["chat_template_kwargs"] = read_object("--chat-template-kwargs", chat_template_kwargs)
    tls = service.check()
    run_generate(
        _read_input() if prompt == "-" else prompt,
        router=service.router,
        api_key=service.api_key,
        tls=tls,
        model=model,
        is_chat=chat,
        system=system,
        stream=stream and not as_json,
        as_json=as_json,
        timeout_s=timeout,
        options=options,
    )


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ClusterConfigError(f"the prompt on stdin is no text: {error}; allowed: UTF-8") from error


@app.command()
@with_flags
def chat(
    *,
    service: RouterFlags,
    model: Model = "",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    chat_template_kwargs: TemplateKwargs = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most this many tokens in an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    timeout: Timeout = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each answer.")] = False,
) -> None:
    """Talk with a model: each line of input is a message.

    Ctrl-C ends an answer; at the prompt it ends the conversation, as Ctrl-D does.
    """
    from cluster.chat import chat as run_chat

    options = {
        "chat_template_kwargs": read_object("--chat-template-kwargs", chat_template_kwargs),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    tls = service.check()
    run_chat(
        router=service.router,
        api_key=service.api_key,
        tls=tls,
        model=model,
        system=system,
        as_json=as_json,
        timeout_s=timeout,
        options={name: value for name, value in options.items() if value is not None},
    )


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    preset: Annotated[
        str | None,
        typer.Option(help="tiny, 110m, 1b, 8b, qwen2.5-0.5b, qwen3-moe-0.5b or tiny-moe; the flags below change it."),
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
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help=f"Folder whose tokenizer is copied; default: that of {DEFAULT_MODEL}.")
    ] = None,
) -> None:
    """Write a model with random weights, for benchmarks and tests."""
    import_for_good("cluster.make_model")
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
    log_level: LogLevel = "warning",
) -> None:
    """Bring up a cluster on this machine, send it some prompts, show what happens, and stop it."""
    import_for_good("cluster.demo")
    from cluster.demo import run_demo

    run_demo(replicas=replicas, tensor_parallel=tensor_parallel, console=Console(), log_level=log_level)


register(app)
app.add_typer(bench_app)
app.command(cls=WholeNamesCommand)(simulate)
app.command()(replay)

if __name__ == "__main__":
    main()
