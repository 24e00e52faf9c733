"""The dashboards of what clients get: overview, models, tenants.

Every query is run against a live Prometheus by tests/e2e/test_boards_and_traces.py, so a renamed metric fails a test.
"""

from panels import Board, Panel
from promql import INSTALLATION, MODEL, TENANT, mean, models_of, percentiles, quantile, rate, share

_FAULTS = "internal|unavailable|resource_exhausted|deadline_exceeded"
"""Outcomes that are the service's doing."""

OVERVIEW = Board(
    name="overview",
    title="Overview",
    text="What clients get: latency, tokens and errors as routers see them.",
    variables=models_of("weft_router_ready_replicas"),
    rows={
        "Now": [
            Panel(
                title="Goodput",
                text="Generated tokens per second of requests that met both targets.",
                unit="suffix: tok/s",
                queries={"goodput": rate("weft_router_goodput_tokens_total")},
                is_stat=True,
            ),
            Panel(
                title="Requests",
                text="Requests that ended, per second.",
                unit="reqps",
                queries={"requests": rate("weft_router_requests_total")},
                is_stat=True,
            ),
            Panel(
                title="TTFT p95",
                text="Time to the first token.",
                unit="s",
                queries={"TTFT": quantile(95, "weft_router_ttft_seconds")},
                is_stat=True,
            ),
            Panel(
                title="Targets met",
                text="Of the requests that count: those that met both targets.",
                unit="percentunit",
                queries={
                    "met": share(
                        rate("weft_router_slo_requests_total", f'{MODEL}, result="met"'),
                        rate("weft_router_slo_requests_total"),
                    )
                },
                is_stat=True,
            ),
            Panel(
                title="Errors",
                text="Of all requests: those that ended by the service's doing.",
                unit="percentunit",
                queries={
                    "errors": share(
                        rate("weft_router_requests_total", f'{MODEL}, outcome=~"{_FAULTS}"'),
                        rate("weft_router_requests_total"),
                    )
                },
                is_stat=True,
            ),
            Panel(
                title="Ready replicas",
                text="Replicas that take requests, as the router sees it that sees most.",
                unit="none",
                queries={"ready": f"sum(max by (installation, model) (weft_router_ready_replicas{{{MODEL}}}))"},
                is_stat=True,
            ),
        ],
        "Latency": [
            Panel(
                title="Time to first token (TTFT)",
                text="From a request's arrival at the router to its first token, with its target.",
                unit="s",
                queries={
                    **percentiles("weft_router_ttft_seconds"),
                    "target": f"max(weft_router_slo_ttft_seconds{{{MODEL}}})",
                },
            ),
            Panel(
                title="Time per output token (TPOT)",
                text="Mean of each request after its first token, with its target.",
                unit="s",
                queries={
                    **percentiles("weft_router_tpot_seconds"),
                    "target": f"max(weft_router_slo_tpot_seconds{{{MODEL}}})",
                },
            ),
            Panel(
                title="Inter-token latency (ITL)",
                text="Gaps between the tokens of a request.",
                unit="s",
                queries=percentiles("weft_router_itl_seconds"),
            ),
            Panel(
                title="End to end",
                text="From a request's arrival to its end, finished requests only.",
                unit="s",
                queries=percentiles("weft_router_e2e_seconds"),
            ),
            Panel(
                title="Wait in the router",
                text="From a request's arrival to its place in flight: tokenizing and the admission queue.",
                unit="s",
                queries=percentiles("weft_router_queue_seconds"),
            ),
            Panel(
                title="Requests in the routers",
                text="In flight and queued, with their limits: a full queue refuses requests.",
                unit="none",
                queries={
                    "in flight": f"sum(weft_router_requests_in_flight{{{INSTALLATION}}})",
                    "queued": f"sum(weft_router_requests_queued{{{INSTALLATION}}})",
                    "most in flight": f"sum(weft_router_max_requests_in_flight{{{INSTALLATION}}})",
                    "most queued": f"sum(weft_router_max_requests_queued{{{INSTALLATION}}})",
                },
            ),
            Panel(
                title="CPU of the routers",
                text="Cores that each takes. One is all it can use: tokens then come in fewer and larger messages.",
                unit="none",
                queries={"{{instance}}": rate("weft_router_cpu_seconds_total", INSTALLATION, by="instance")},
            ),
        ],
        "Tokens and outcomes": [
            Panel(
                title="Tokens",
                text="Prompt tokens in, those of them that were found in caches, and generated tokens out.",
                unit="suffix: tok/s",
                queries={
                    "in": rate("weft_router_prompt_tokens_total"),
                    "in, cached": rate("weft_router_cached_tokens_total"),
                    "out": rate("weft_router_generation_tokens_total"),
                    "out, good": rate("weft_router_goodput_tokens_total"),
                },
            ),
            Panel(
                title="Outcomes",
                text="Requests by how they ended.",
                unit="reqps",
                queries={"{{outcome}}": rate("weft_router_requests_total", by="outcome")},
                is_stacked=True,
            ),
            Panel(
                title="Targets",
                text="Requests by how they met the targets; those that their client ended do not count.",
                unit="reqps",
                queries={"{{result}}": rate("weft_router_slo_requests_total", by="result")},
                is_stacked=True,
            ),
        ],
    },
)

MODELS = Board(
    name="models",
    title="Models",
    text="The models of a cluster beside each other.",
    variables=models_of("weft_router_ready_replicas"),
    rows={
        "What clients get": [
            Panel(
                title="Requests",
                text="That ended, per second.",
                unit="reqps",
                queries={"{{model}}": rate("weft_router_requests_total", by="model")},
            ),
            Panel(
                title="TTFT p95",
                text="Time to the first token.",
                unit="s",
                queries={"{{model}}": quantile(95, "weft_router_ttft_seconds", by="model")},
            ),
            Panel(
                title="TPOT p95",
                text="Time per output token after the first.",
                unit="s",
                queries={"{{model}}": quantile(95, "weft_router_tpot_seconds", by="model")},
            ),
            Panel(
                title="Prompt tokens",
                text="In, per second.",
                unit="suffix: tok/s",
                queries={"{{model}}": rate("weft_router_prompt_tokens_total", by="model")},
            ),
            Panel(
                title="Generated tokens",
                text="Out, per second.",
                unit="suffix: tok/s",
                queries={"{{model}}": rate("weft_router_generation_tokens_total", by="model")},
            ),
            Panel(
                title="Targets met",
                text="Of the requests that count: those that met both targets.",
                unit="percentunit",
                queries={
                    "{{model}}": share(
                        rate("weft_router_slo_requests_total", f'{MODEL}, result="met"', by="model"),
                        rate("weft_router_slo_requests_total", by="model"),
                    )
                },
            ),
        ],
        "What they take": [
            Panel(
                title="Running and waiting",
                text="Requests in the engines.",
                unit="none",
                queries={
                    "{{model}}: running": f"sum by (model) (weft_requests_running{{{MODEL}}})",
                    "{{model}}: waiting": f"sum by (model) (weft_requests_waiting{{{MODEL}}})",
                },
            ),
            Panel(
                title="KV usage",
                text="Mean over the replicas.",
                unit="percentunit",
                queries={"{{model}}": f"avg by (model) (weft_kv_usage_ratio{{{MODEL}}})"},
            ),
            Panel(
                title="Hit rate",
                text="Prompt tokens found in caches, of all.",
                unit="percentunit",
                queries={
                    "{{model}}": share(
                        rate("weft_router_cached_tokens_total", by="model"),
                        rate("weft_router_prompt_tokens_total", by="model"),
                    )
                },
            ),
        ],
    },
)

TENANTS = Board(
    name="tenants",
    title="Tenants",
    text="Who uses the cluster. A tenant is the name of an API key, or the hash of a cache salt; `none` sent neither, "
    "`other` are the salts after the first router.metrics.max_tenants.",
    variables={
        **models_of("weft_router_ready_replicas"),
        "tenant": f"label_values(weft_router_tenant_requests_total{{{MODEL}}}, tenant)",
    },
    rows={
        "Use": [
            Panel(
                title="Requests",
                text="That ended, per second.",
                unit="reqps",
                queries={"{{tenant}}": rate("weft_router_tenant_requests_total", TENANT, by="tenant")},
                is_stacked=True,
            ),
            Panel(
                title="Prompt tokens",
                text="In, counted when a request ends.",
                unit="suffix: tok/s",
                queries={"{{tenant}}": rate("weft_router_tenant_prompt_tokens_total", TENANT, by="tenant")},
                is_stacked=True,
            ),
            Panel(
                title="Generated tokens",
                text="Out, counted when a request ends.",
                unit="suffix: tok/s",
                queries={"{{tenant}}": rate("weft_router_tenant_generation_tokens_total", TENANT, by="tenant")},
                is_stacked=True,
            ),
        ],
        "What they get": [
            Panel(
                title="TTFT",
                text="Mean time to the first token.",
                unit="s",
                queries={"{{tenant}}": mean("weft_router_tenant_ttft_seconds", TENANT, by="tenant")},
            ),
            Panel(
                title="Hit rate",
                text="Prompt tokens found in caches, of all.",
                unit="percentunit",
                queries={
                    "{{tenant}}": share(
                        rate("weft_router_tenant_cached_tokens_total", TENANT, by="tenant"),
                        rate("weft_router_tenant_prompt_tokens_total", TENANT, by="tenant"),
                    )
                },
            ),
            Panel(
                title="Outcomes",
                text="Requests by how they ended.",
                unit="reqps",
                queries={"{{outcome}}": rate("weft_router_tenant_requests_total", TENANT, by="outcome")},
                is_stacked=True,
            ),
        ],
    },
)
