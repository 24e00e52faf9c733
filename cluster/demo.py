"""The demo: a cluster on this machine, real prompts through gRPC, text as it streams, and who served what how fast."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config import build_spec
from cluster.generate import milliseconds, summary
from cluster.service import Service
from cluster.signals import signals_as_interrupts
from cluster.status_view import StartView
from router.client import AsyncClient, Client, Completion
from router.client_values import Collector, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """One thing to ask."""

    text: str
    is_chat: bool = False
    temperature: float = 0.0

    @property
    def plain(self) -> str | None:
        """The text to send; None for a conversation."""
        return None if self.is_chat else self.text

    @property
    def messages(self) -> list[dict[str, str]] | None:
        """The conversation to send; None for a plain text."""
        return [{"role": "user", "content": self.text}] if self.is_chat else None

    @property
    def options(self) -> Options:
        """How to sample."""
        return {"max_tokens": 200, "temperature": self.temperature, "seed": 7, "timeout_s": 60.0}


ONE_BY_ONE = (
    DemoPrompt(text="Once upon a time", temperature=0.7),
    DemoPrompt(text="Who are you?", is_chat=True),
    DemoPrompt(text="Tell me a story about a dog.", is_chat=True, temperature=0.7),
)
AT_ONCE = (
    DemoPrompt(text="What colour is the sky?", is_chat=True),
    DemoPrompt(text="What is 2 + 3?", is_chat=True),
    DemoPrompt(text="Write a JSON record of a cat named Tom.", is_chat=True),
    DemoPrompt(text="What is the capital of France?", is_chat=True),
    DemoPrompt(text="How many legs does a spider have?", is_chat=True),
    DemoPrompt(text="Tell me a story about an otter.", is_chat=True),
    DemoPrompt(text="What day comes after Monday?", is_chat=True),
    DemoPrompt(text="There was once a brave otter called Nora,"),
)


def run_demo(*, replicas: int, tensor_parallel: int, console: Console, log_level: str) -> None:
    """Start, ask, show, stop. Raises ClusterError, ModelError or EngineConfigError when it does not come up."""
    spec = build_spec(
        {
            "models": [{"replicas": replicas, "tensor_parallel": tensor_parallel, "device": "cpu"}],
            "router": {"port": 0, "http_port": 0, "metrics_port": 0},
            "controller": {"port": 0},
        }
    )
    console.print(
        f"[bold]Starting[/] {replicas} replica groups of {tensor_parallel} tensor-parallel ranks "
        f"that serve {spec.models[0].name}, on a local Ray ..."
    )
    started_s = time.monotonic()
    with signals_as_interrupts(), Service.start(spec, log_level=log_level) as service:
        with StartView(console) as view:
            service.wait_ready(on_status=view.show)
        address = service.status().routers[0].grpc_address
        with Client(address) as client:
            client.wait_ready(30.0, replicas=replicas)
            console.print(f"READY after {time.monotonic() - started_s:.1f} s; gRPC at {address}\n")
            answers = [(prompt, _stream(client, prompt, console)) for prompt in ONE_BY_ONE]
        answers += asyncio.run(_ask_at_once(address, AT_ONCE, console))
        _print_table(answers, console)
        stopping_s = time.monotonic()
        service.shut_down(5.0)
    now_s = time.monotonic()
    console.print(f"Stopped in {now_s - stopping_s:.1f} s; {now_s - started_s:.1f} s in all.")


def _stream(client: Client, prompt: DemoPrompt, console: Console) -> Completion:
    """Ask, and print the text as it comes."""
    console.print(f"[bold cyan]{'user' if prompt.is_chat else 'text'}>[/] {prompt.text}")
    collector = Collector()
    for delta in client.generate(prompt.plain, messages=prompt.messages, **prompt.options):
        collector.add(delta)
        console.out(delta.text, end="", highlight=False)
    completion = collector.completion()
    console.print(f"\n[dim]{summary(completion)}[/]\n", highlight=False)
    return completion


async def _ask_at_once(
    address: str, prompts: Sequence[DemoPrompt], console: Console
) -> list[tuple[DemoPrompt, Completion]]:
    """Ask all at the same time, and print each answer when it is complete."""
    console.print(f"[bold]{len(prompts)} prompts at once[/]")

    async def ask(client: AsyncClient, prompt: DemoPrompt) -> tuple[DemoPrompt, Completion]:
        completion = await client.complete(prompt.plain, messages=prompt.messages, **prompt.options)
        console.print(f"[cyan]{prompt.text}[/] {escape(completion.text.strip())}", highlight=False)
        return prompt, completion

    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    console.print()
    return list(answers)


def _print_table(answers: Sequence[tuple[DemoPrompt, Completion]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompt", no_wrap=True, max_width=25)  # all of it in 80 columns
    table.add_column("served by", no_wrap=True)
    for column in ("in", "cached", "out", "TTFT", "TPOT"):
        table.add_column(column, justify="right", no_wrap=True)
    for prompt, completion in answers:
        usage = completion.usage
        table.add_row(
            prompt.text,
            ", ".join(completion.replica_ids),
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.completion_tokens),
            milliseconds(completion.ttft_s),
            milliseconds(completion.tpot_s),
        )
    console.print(table)
