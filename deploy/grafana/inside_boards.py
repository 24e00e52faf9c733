"""The dashboards of what the cluster does: replicas and ranks, routing, groups.

Every query is run against a live Prometheus by tests/e2e/test_boards_and_traces.py, so a renamed metric fails a test.
"""

from panels import Board, Panel
from promql import INSTALLATION, MODEL, REPLICA, mean, models_of, percentiles, quantile, rate, share


def _of_replicas(counter: str) -> str:
    """Return the rate of a counter of each replica."""
    return rate(counter, REPLICA, by="installation, replica")


def _of_ranks(counter: str) -> str:
    """Return the rate of a counter of each rank."""
    return rate(counter, REPLICA, by="installation, replica, rank")


REPLICAS = Board(
    name="replicas",
    title="Replicas and ranks",
    text="What each replica's engine does, and each rank of its group.",
    variables={
        **models_of("weft_kv_blocks"),
        "replica": f"label_values(weft_kv_blocks{{{MODEL}}}, replica)",
    },
    rows={
        "Requests": [
            Panel(
                title="Running",
                text="Requests in the running batch.",
                unit="none",
                queries={"{{replica}}": f"weft_requests_running{{{REPLICA}}}"},
            ),
            Panel(
                title="Waiting",
                text="Requests in the engine's queue: more than a few for long means too few replicas.",
                unit="none",
                queries={"{{replica}}": f"weft_requests_waiting{{{REPLICA}}}"},
            ),
            Panel(
                title="Pending tokens",
                text="Tokens not yet computed, of waiting and running requests: prompts, and outputs that are resumed.",
                unit="none",
                queries={"{{replica}}": f"weft_pending_tokens{{{REPLICA}}}"},
            ),
            Panel(
                title="Wait in the engine",
                text="From a request's arrival at the engine to its first step.",
                unit="s",
                queries=percentiles("weft_queue_seconds", REPLICA),
            ),
            Panel(
                title="TTFT and ITL in the engine",
                text="Without what router and network add.",
                unit="s",
                queries={
                    "TTFT p95": quantile(95, "weft_ttft_seconds", REPLICA),
                    "ITL p95": quantile(95, "weft_itl_seconds", REPLICA),
                    "end to end p95": quantile(95, "weft_e2e_seconds", REPLICA),
                },
            ),
            Panel(
                title="Ended",
                text="Requests by how they ended in the engine; refused ones were never accepted.",
                unit="reqps",
                queries={
                    "{{reason}}": rate("weft_requests_finished_total", REPLICA, by="reason"),
                    "failed": rate("weft_requests_failed_total", REPLICA),
                    "refused": rate("weft_requests_refused_total", REPLICA),
                },
                is_stacked=True,
            ),
        ],
        "KV cache": [
            Panel(
                title="KV usage",
                text="Blocks in use by requests, of all; blocks that are only cached count as free.",
                unit="percentunit",
                queries={"{{replica}}": f"weft_kv_usage_ratio{{{REPLICA}}}"},
            ),
            Panel(
                title="Cached blocks",
                text="Blocks in which a prefix can be found, of all, those of the host tier included.",
                unit="percentunit",
                queries={
                    "{{replica}}": f"weft_kv_cached_blocks{{{REPLICA}}} "
                    f"/ (weft_kv_blocks{{{REPLICA}}} + weft_kv_host_blocks{{{REPLICA}}})"
                },
            ),
            Panel(
                title="Cached tokens by source",
                text="Prompt tokens that were found on the device, and those that came back from the host.",
                unit="suffix: tok/s",
                queries={"{{source}}": rate("weft_cached_tokens_total", REPLICA, by="source")},
                is_stacked=True,
            ),
            Panel(
                title="Host tier",
                text="Blocks copied to the host when they were evicted, and back. Many saved and few loaded: nobody "
                "asks for those prefixes again, or they are gone before somebody does.",
                unit="none",
                queries={
                    "{{replica}}: saved": _of_replicas("weft_kv_saved_blocks_total"),
                    "{{replica}}: loaded": _of_replicas("weft_kv_loaded_blocks_total"),
                },
            ),
            Panel(
                title="Host tier in use",
                text="Of the blocks that it can hold; full it forgets what was used longest ago.",
                unit="percentunit",
                queries={
                    "{{replica}}": f"weft_kv_host_used_blocks{{{REPLICA}}} "
                    f"/ clamp_min(weft_kv_host_blocks{{{REPLICA}}}, 1)"
                },
            ),
            Panel(
                title="Preemptions",
                text="Running requests that gave up their blocks, and the tokens that were computed again for it.",
                unit="none",
                queries={
                    "{{replica}}": _of_replicas("weft_preemptions_total"),
                    "{{replica}}: tokens again": _of_replicas("weft_recomputed_tokens_total"),
                },
            ),
        ],
        "Steps": [
            Panel(
                title="Step time",
                text="From the submission of a step to its output.",
                unit="s",
                queries=percentiles("weft_step_seconds", REPLICA),
            ),
            Panel(
                title="Batch size",
                text="Sequences in a step: mean and 95th percentile.",
                unit="none",
                queries={
                    "{{replica}}": mean("weft_step_sequences", REPLICA, by="installation, replica"),
                    "p95": quantile(95, "weft_step_sequences", REPLICA),
                },
            ),
            Panel(
                title="Tokens in a step",
                text="Of all sequences, prompts included: mean and 95th percentile.",
                unit="none",
                queries={
                    "{{replica}}": mean("weft_step_tokens", REPLICA, by="installation, replica"),
                    "p95": quantile(95, "weft_step_tokens", REPLICA),
                },
            ),
            Panel(
                title="Steps",
                text="Steps per second.",
                unit="ops",
                queries={"{{replica}}": _of_replicas("weft_steps_total")},
            ),
            Panel(
                title="Busy",
                text="Part of the time in which a step is in flight.",
                unit="percentunit",
                queries={"{{replica}}": _of_replicas("weft_busy_seconds_total")},
            ),
            Panel(
                title="Tokens",
                text="Through the model, and sampled.",
                unit="suffix: tok/s",
                queries={
                    "{{replica}}: computed": _of_replicas("weft_computed_tokens_total"),
                    "{{replica}}: generated": _of_replicas("weft_generation_tokens_total"),
                },
            ),
        ],
        "Ranks": [
            Panel(
                title="Time of a rank's step",
                text="A rank's part of a step, waiting for the others of its group included.",
                unit="s",
                queries={
                    "{{replica}}/{{rank}}": share(
                        _of_ranks("weft_rank_busy_seconds_total"), _of_ranks("weft_rank_steps_total")
                    )
                },
            ),
            Panel(
                title="Model idle under backlog",
                text="Part of the time with work for it in which a rank's model does not compute: what goes on between "
                "its steps.",
                unit="percentunit",
                queries={
                    "{{replica}}/{{rank}}": share(
                        _of_ranks("weft_rank_model_idle_seconds_total"),
                        f"({_of_ranks('weft_rank_model_busy_seconds_total')} "
                        f"+ {_of_ranks('weft_rank_model_idle_seconds_total')})",
                    )
                },
            ),
            Panel(
                title="Bandwidth reached by the model",
                text="The least that a rank's model must read in its steps (weights, keys and values; experts by "
                "expectation) over the time in which it computes. Decoding is near the memory's own bandwidth at best; "
                "prompts are bound by products, and lower it.",
                unit="Bps",
                queries={
                    "{{replica}}/{{rank}}": share(
                        _of_ranks("weft_rank_model_read_bytes_total"), _of_ranks("weft_rank_model_busy_seconds_total")
                    )
                },
            ),
            Panel(
                title="Operations of the model",
                text="What a rank's model must compute in its steps (matrix products and attention; experts by "
                "expectation) over the time in which it computes.",
                unit="flops",
                queries={
                    "{{replica}}/{{rank}}": share(
                        _of_ranks("weft_rank_model_flops_total"), _of_ranks("weft_rank_model_busy_seconds_total")
                    )
                },
            ),
            Panel(
                title="Peak memory of ranks",
                text="The most that a rank has held since its start: resident on a CPU, allocated on a GPU.",
                unit="bytes",
                queries={"{{replica}}/{{rank}}": f"weft_rank_peak_memory_bytes{{{REPLICA}}}"},
            ),
            Panel(
                title="Time in collectives",
                text="Part of the rank's time in steps. On a CPU the slow rank of a group is the one that waits least.",
                unit="percentunit",
                queries={
                    "{{replica}}/{{rank}}": share(
                        _of_ranks("weft_rank_collective_seconds_total"), _of_ranks("weft_rank_busy_seconds_total")
                    )
                },
            ),
            Panel(
                title="Collectives",
                text="Calls per second, by axis and kind.",
                unit="ops",
                queries={"{{axis}} {{kind}}": rate("weft_rank_collectives_total", REPLICA, by="axis, kind")},
            ),
            Panel(
                title="Steps behind",
                text="Steps between the first and the last rank of a group: many for long: one hangs.",
                unit="none",
                queries={
                    "{{replica}}": f"max by (installation, replica) (weft_rank_steps_total{{{REPLICA}}}) "
                    f"- min by (installation, replica) (weft_rank_steps_total{{{REPLICA}}})"
                },
            ),
            Panel(
                title="Weights loaded",
                text="Of each rank.",
                unit="percentunit",
                queries={"{{replica}}/{{rank}}": f"weft_rank_loaded_ratio{{{REPLICA}}}"},
            ),
            Panel(
                title="What ranks compute with",
                text="Ranks by their kernels, what attends where it can, dtype and device: ranks of one model that "
                "differ here differ in speed.",
                unit="none",
                queries={
                    "{{kernels}}, {{attention_backend}}, {{dtype}} on {{device}}": "count by (kernels, "
                    f"attention_backend, dtype, device) (weft_rank_info{{{REPLICA}}})"
                },
            ),
            Panel(
                title="Steps recorded",
                text="Sizes of steps that each rank recorded as CUDA graphs before it served; 0 on a CPU.",
                unit="none",
                queries={"{{replica}}/{{rank}}": f"weft_rank_recorded_steps{{{REPLICA}}}"},
            ),
            Panel(
                title="Time of recording",
                text="How long a rank recorded steps when it started: a part of a replica's cold start.",
                unit="s",
                queries={"{{replica}}/{{rank}}": f"weft_rank_recording_seconds{{{REPLICA}}}"},
            ),
        ],
    },
)

ROUTING = Board(
    name="routing",
    title="Routing",
    text="Where requests go, what of their prompts is found there, and what goes wrong on the way.",
    variables=models_of("weft_router_ready_replicas"),
    rows={
        "Prefixes": [
            Panel(
                title="Hit rate",
                text="Prompt tokens found in caches, of all: as usage tells, as routers expected, as engines count.",
                unit="percentunit",
                queries={
                    "real": share(rate("weft_router_cached_tokens_total"), rate("weft_router_prompt_tokens_total")),
                    "predicted": share(
                        rate("weft_router_predicted_cached_tokens_total"), rate("weft_router_prompt_tokens_total")
                    ),
                    "engines": share(rate("weft_cached_tokens_total"), rate("weft_prompt_tokens_total")),
                },
            ),
            Panel(
                title="Overlap, predicted and real",
                text="Cached prompt tokens that routers counted on, and those that were there. They part when a block "
                "is evicted between the choice and the first step, or when an index drifts.",
                unit="suffix: tok/s",
                queries={
                    "predicted": rate("weft_router_predicted_cached_tokens_total"),
                    "real": rate("weft_router_cached_tokens_total"),
                },
            ),
            Panel(
                title="Index drift",
                text="Blocks that a router's index has too many or too few of, against what the replica holds. "
                "Scrapes are not of one moment: a peak means nothing, a plateau does.",
                unit="none",
                queries={
                    "{{replica}} at {{instance}}": f"abs(weft_router_replica_indexed_blocks{{{MODEL}}} "
                    f"- on (installation, model, replica) group_left () weft_kv_cached_blocks{{{MODEL}}})"
                },
            ),
        ],
        "Balance": [
            Panel(
                title="Choices",
                text="Replicas chosen, by why: a cached prefix, the home of a new one, load, or its turn.",
                unit="reqps",
                queries={"{{reason}}": rate("weft_router_choices_total", by="reason")},
                is_stacked=True,
            ),
            Panel(
                title="Requests on replicas",
                text="As routers see them.",
                unit="none",
                queries={"{{replica}}": f"max by (installation, replica) (weft_router_replica_requests{{{MODEL}}})"},
            ),
            Panel(
                title="Imbalance",
                text="Requests on the fullest replica of a model, in means of all its replicas: 1 is even.",
                unit="none",
                queries={
                    "{{model}}": f"max by (installation, model) (weft_router_replica_requests{{{MODEL}}}) "
                    f"/ clamp_min(avg by (installation, model) (weft_router_replica_requests{{{MODEL}}}), 1)"
                },
            ),
            Panel(
                title="Pending tokens on replicas",
                text="As routers see them, with what is on its way.",
                unit="none",
                queries={
                    "{{replica}}": f"max by (installation, replica) (weft_router_replica_pending_tokens{{{MODEL}}})"
                },
            ),
        ],
        "Trouble": [
            Panel(
                title="Failovers",
                text="Replicas that broke under a request, which then went on elsewhere.",
                unit="reqps",
                queries={"{{model}}": rate("weft_router_failovers_total", by="model")},
            ),
            Panel(
                title="Retries",
                text="Requests that a replica refused: it was full or about to leave.",
                unit="reqps",
                queries={"{{model}}": rate("weft_router_retries_total", by="model")},
            ),
            Panel(
                title="Routers with a replica",
                text="Routers that could send a request to it.",
                unit="none",
                queries={"{{replica}}": f"sum by (installation, replica) (weft_router_replica_ready{{{MODEL}}})"},
            ),
        ],
    },
)

CLUSTER = Board(
    name="cluster",
    title="Cluster",
    text="What the controller wants and has: groups, restarts and routers.",
    variables=models_of("weft_cluster_replicas_wanted"),
    rows={
        "Scaling": [
            Panel(
                title="Replicas wanted and ready",
                text="The distance is what the controller works on.",
                unit="none",
                queries={
                    "{{model}}: wanted": f"sum by (model) (weft_cluster_replicas_wanted{{{MODEL}}})",
                    "{{model}}: ready": f"sum by (model) (weft_cluster_replicas_ready{{{MODEL}}})",
                },
            ),
            Panel(
                title="Groups by state",
                text="A group that is long PENDING does not fit; `weft status` says why. A FAILED one is given up.",
                unit="none",
                queries={"{{state}}": f"sum by (state) (weft_cluster_groups{{{MODEL}}})"},
                is_stacked=True,
            ),
            Panel(
                title="Time in the state",
                text="Of each group.",
                unit="s",
                queries={"{{group}}: {{state}}": f"weft_cluster_group_state_seconds{{{MODEL}}}"},
            ),
        ],
        "Restarts": [
            Panel(
                title="Restarts of groups",
                text="Formations after the first, in the last 15 minutes.",
                unit="none",
                queries={"{{group}}": f"increase(weft_cluster_group_restarts_total{{{MODEL}}}[15m])"},
            ),
            Panel(
                title="Weights loaded",
                text="Of each group, while it starts.",
                unit="percentunit",
                queries={"{{group}}": f"weft_cluster_group_loaded_ratio{{{MODEL}}}"},
            ),
            Panel(
                title="Routers",
                text="Those that the controller keeps alive, and how often it started them again in 15 minutes.",
                unit="none",
                queries={
                    "{{router}}: alive": f"weft_cluster_router_alive{{{INSTALLATION}}}",
                    "{{router}}: restarts": f"increase(weft_cluster_router_restarts_total{{{INSTALLATION}}}[15m])",
                },
            ),
        ],
    },
)
