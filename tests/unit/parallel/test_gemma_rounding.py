"""What Gemma was trained with in 16 bits: norms that add the one in float32, and a rounded factor on embeddings."""

import torch

from parallel.description import NormKind
from parallel.embedding import InputEmbedding
from parallel.families.registry import describe_config
from parallel.kernels.reference import ReferenceKernels
from parallel.layer import LayerContext
from parallel.mesh import Axis
from parallel.norm import make_norm

CONTEXT = LayerContext(axis=Axis(), kernels=ReferenceKernels(), device=torch.device("cpu"), dtype=torch.bfloat16)
SIZES = {"vocab_size": 32, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}


def test_a_norm_by_one_more_than_its_weight_equals_transformers_to_the_bit() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    torch.manual_seed(0)
    original = GemmaRMSNorm(48, eps=1e-6).to(torch.bfloat16)
    torch.nn.init.normal_(original.weight, std=0.2)
    norm = make_norm(NormKind.RMS_PLUS_ONE, 48, 1e-6, context=CONTEXT)
    (parameter,) = norm.sharded_parameters("norm")
    parameter.tensor.copy_(original.weight.detach())
    norm.finish_loading()
    x = torch.randn(50, 48).bfloat16()

    assert torch.equal(norm(x), original(x).detach())


def test_the_factor_on_embeddings_is_rounded_as_the_weights_are() -> None:
    description = describe_config({"model_type": "gemma", **SIZES, "num_attention_heads": 4}, source="test")
    embedding = InputEmbedding(description, context=CONTEXT)
    (parameter,) = embedding.sharded_parameters()
    parameter.tensor.copy_(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)))
    table = parameter.tensor.clone()
    token_ids = torch.arange(32)

    found = embedding(token_ids, token_ids)

    assert torch.equal(found, table * torch.tensor(48**0.5).bfloat16())
