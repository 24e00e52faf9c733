"""What a model family is: how its config.json is read, and where its checkpoints have the decoder's tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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
    """The decoder's modules (see parallel/shard.py) -> those of the checkpoint; "layers" is the list of layers."""
    fusions: Mapping[str, Fuse] = field(default_factory=dict)
    """Modules of the checkpoint, below a layer, that hold several of the decoder's, and how."""
    transposed: frozenset[str] = frozenset()
    """Modules of the checkpoint, below a layer, whose weight is stored [in, out]."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Parts of names -> what some checkpoints have in their place."""

    def tensor_name(self, name: str) -> str:
        """The checkpoint's name for a tensor of the decoder: "layers.3.mlp.up.weight" -> "model.layers.3.mlp..."."""
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            _, index, part = module.split(".", 2)
            return f"{self.module_names['layers']}.{index}.{self.module_names[part]}.{leaf}"
        return f"{self.module_names[module]}.{leaf}"

    def locate(self, name: str, description: DecoderDescription) -> Location:
        """Where a tensor of the decoder lies."""
        stored_name = self.tensor_name(name)
        module, _, leaf = name.rpartition(".")
        if not module.startswith("layers."):
            return Location(name=stored_name)
        stored_module = self.module_names[module.split(".", 2)[2]]
        fuse = self.fusions.get(stored_module)
        return Location(
            name=stored_name,
            fusion=None if fuse is None else fuse(description),
            part=module.rpartition(".")[2],
            is_transposed=leaf == "weight" and stored_module in self.transposed,
        )

    def other_names(self, name: str) -> Iterator[str]:
        """What else a checkpoint may call the tensor that it should call `name`."""
        for part, other in self.aliases.items():
            if part in name:
                yield name.replace(part, other, 1)


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
