"""Cuts a traced graph at the calls that a compiler must not see: pieces to compile, and those calls between them.

Knows graphs only; what traces, compiles and calls is in inductor.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A run of operations as a graph of its own."""

    module: GraphModule
    """Takes the values of `inputs` and returns those of `outputs`, each as a flat tuple."""
    inputs: tuple[Node, ...]
    """Nodes of the whole graph, as are the outputs."""
    outputs: tuple[Node, ...]

    @property
    def text(self) -> str:
        """The operations: the same for pieces that differ in the values of their inputs only."""
        return str(self.module.graph)


def cut(graph: Graph, is_call: Callable[[Node], bool]) -> Iterator[Piece | Node]:
    """Pieces and calls in the order in which they run. What the graph is given, and constants, are in neither."""
    members: list[Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and not is_call(node):
            members.append(node)
        elif node.op in ("call_function", "output"):
            if members:
                yield _make_piece(members)
            members = []
            if node.op != "output":
                yield node


def _make_piece(members: list[Node]) -> Piece:
    inside = set(members)
    inputs = tuple(dict.fromkeys(node for member in members for node in member.all_input_nodes if node not in inside))
    outputs = tuple(member for member in members if any(user not in inside for user in member.users))
    graph = Graph()
    copies = {node: graph.placeholder(f"given_{i}") for i, node in enumerate(inputs)}
    for member in members:
        args: Any = map_arg(member.args, copies.__getitem__)
        kwargs: Any = map_arg(member.kwargs, copies.__getitem__)
        copies[member] = graph.create_node(member.op, member.target, args, kwargs)  # without its name: see `Piece.text`
    for node, copy in copies.items():
        copy.meta = node.meta.copy()
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(module=GraphModule(torch.nn.Module(), graph), inputs=inputs, outputs=outputs)
