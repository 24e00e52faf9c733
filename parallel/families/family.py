"""What a model family is: how its config.json is read, and where its checkpoints have the decoder's tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from parallel.description import DecoderDescription
from parallel.families.fields import Fields
from parallel.families.layout import Fuse, Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family of Hugging Face."""

    model_type: str
    describe: Callable[[Fields], DecoderDescription]
    """Reads a config; raises ConfigError or UnsupportedModelError."""
    module_names: Mapping[str, str]
    """The decoder's modules (see parallel/shard.py) -> those of the checkpoint; "layers" is the list of layers.

    A tensor that is called other than its module and "weight" or "bias" has an entry of its own, which counts more.
    "*" is the number of an expert; a name without it, for the experts, is that of one tensor with all of them.
    """
    own_names: Callable[[DecoderDescription], Mapping[str, str]] | None = None
    """What some of its models have in place of `module_names`."""
    fusions: Mapping[str, Fuse] = field(default_factory=dict)
    """Modules of the checkpoint, below a layer, that hold several of the decoder's, and how."""
    transposed: frozenset[str] = frozenset()
    """Modules of the checkpoint, below a layer, whose weight is stored [in, out]."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Parts of names -> what some checkpoints have in their place."""

    def named_for(self, description: DecoderDescription) -> "Family":
        """Return the family with the module names of one of its models."""
        if self.own_names is None:
            return self
        return replace(self, module_names={**self.module_names, **self.own_names(description)})

    def tensor_name(self, name: str) -> str:
        """The checkpoint's name for a tensor of the decoder: "layers.3.mlp.up.weight" -> "model.layers.3.mlp..."."""
        prefix, part, expert = self._split(name)
        return prefix + self._stored_names(part)[1].replace("*", str(expert))

    def locate(self, name: str, description: DecoderDescription) -> Location:
        """Where a tensor of the decoder lies."""
        _, part, expert = self._split(name)
        stored_module, pattern = self._stored_names(part)
        fuse = self.fusions.get(stored_module)
        is_stacked = expert is not None and "*" not in pattern
        return Location(
            name=self.tensor_name(name),
            fusion=None if fuse is None else fuse(description),
            part=part.split(".")[-2],
            is_transposed=not part.endswith("bias") and stored_module in self.transposed,
            expert=expert if is_stacked else None,
            num_experts=description.moe.num_experts if is_stacked and description.moe is not None else 0,
        )

    def _split(self, name: str) -> tuple[str, str, int | None]:
        """ "layers.3.mlp.experts.7.up.weight" -> ("model.layers.3.", "mlp.experts.*.up.weight", 7)."""
        if not name.startswith("layers."):
            return "", name, None
        _, layer, part = name.split(".", 2)
        match = _EXPERT.search(part)
        prefix = f"{self.module_names['layers']}.{layer}."
        return (prefix, part, None) if match is None else (prefix, _EXPERT.sub(".*.", part), int(match[1]))

    def _stored_names(self, part: str) -> tuple[str, str]:
        """The module that the checkpoint has for a tensor, and its name of the tensor."""
        module, _, leaf = part.rpartition(".")
        stored_name = self.module_names.get(part)
        if stored_name is not None:
            return stored_name, stored_name
        return self.module_names[module], f"{self.module_names[module]}.{leaf}"

    def other_names(self, name: str) -> Iterator[str]:
        """What else a checkpoint may call the tensor that it should call `name`."""
        for part, other in self.aliases.items():
            if part in name:
                yield name.replace(part, other, 1)


_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)\.")

LLAMA_MODULE_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""The names that Llama introduced and most families kept."""

QWEN_EXPERT_NAMES: Mapping[str, str] = {
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.*.{part}": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")},
}
"""Module names that Qwen and DeepSeek have for experts."""
