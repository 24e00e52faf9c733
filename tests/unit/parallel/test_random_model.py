"""Random models of any geometry load in transformers, are varied, and can be made larger than memory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import FAMILIES, load_original
from safetensors.torch import load_file

from parallel.checkpoint import load_decoder
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Mesh
from parallel.random_model import write_random_model
from parallel.weight_index import SAFETENSORS

REPOSITORY = Path(__file__).resolve().parents[3]

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def _config(model_type: str = "llama", **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **values}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_and_its_logits_are_varied(tmp_path: Path, family: str, is_tied: bool) -> None:
    config = _config(family, tie_word_embeddings=is_tied, attention_bias=True, mlp_bias=True)
    write_random_model(tmp_path, config, 0, torch.float32)
    tokens = torch.randint(320, (1, 200), generator=torch.Generator().manual_seed(0))

    model = load_original(tmp_path)
    with torch.inference_mode():
        logits = model(tokens).logits[0]

    assert model.config.eos_token_id == 2
    assert 1.0 < logits.std() < 4.0
    choices = logits.argmax(dim=-1)
    assert len(set(choices.tolist())) > 60  # of 200 positions
    assert (choices == tokens[0]).sum() < 20  # it does not only repeat


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "bloom", "opt", "stablelm", "falcon"])
def test_transformers_finds_every_tensor_of_other_layouts(tmp_path: Path, family: str) -> None:
    import transformers

    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 8, "ffn_dim": 96, "qk_layernorm": True, "num_key_value_heads": 8}
    sizes["intermediate_size"] = 256 if family in ("gpt2", "bloom", "falcon") else 96
    write_random_model(tmp_path, _config(family, pad_token_id=0, **sizes), 0, torch.float32)

    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    logits = model(torch.randint(320, (1, 50))).logits

    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.5 < logits.std() < 8.0


@pytest.mark.parametrize("num_norms", [1, 2])
def test_transformers_finds_the_norms_of_newer_falcons(tmp_path: Path, num_norms: int) -> None:
    options = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": num_norms, "intermediate_size": 256}
    write_random_model(tmp_path, _config("falcon", **options), 0, torch.float32)

    _, info = transformers_model(tmp_path)

    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8},
    "deepseek_v3": {"n_routed_experts": 16, "num_key_value_heads": 8, "kv_lora_rank": 40, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8, "quantization_config": {"quant_method": "mxfp4"}},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_transformers_finds_every_expert(tmp_path: Path, family: str) -> None:
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    config = _config(family, num_experts_per_tok=2, **sizes) | EXPERTS[family]
    write_random_model(tmp_path, config, 0, torch.float32)

    model, info = transformers_model(tmp_path)
    with torch.inference_mode():
        choices = model(torch.randint(320, (1, 100), generator=torch.Generator().manual_seed(0))).logits[0].argmax(-1)

    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(set(choices.tolist())) > 40


def transformers_model(folder: Path) -> Any:
    """The model, and what was found and missed of its tensors."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weft_loads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    write_random_model(tmp_path, _config("qwen3"), 0, dtype)

    load_decoder(tmp_path, mesh=Mesh.single(), device=torch.device("cpu"), dtype=dtype, kernels=ReferenceKernels())

    tensors = load_file(tmp_path / SAFETENSORS.single)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_seed_and_name_decide_the_weights(tmp_path: Path) -> None:
    for name, seed, layers in (("a", 1, 3), ("b", 1, 3), ("c", 2, 3), ("d", 1, 2)):
        write_random_model(tmp_path / name, _config(num_hidden_layers=layers), seed, torch.float32)
    a, b, c, d = (load_file(tmp_path / name / SAFETENSORS.single) for name in "abcd")

    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)
    assert all(torch.equal(a[name], d[name]) for name in d)
    assert not torch.equal(a["model.layers.0.mlp.up_proj.weight"], a["model.layers.1.mlp.up_proj.weight"])


def test_large_model_is_written_in_shards_of_the_same_weights(tmp_path: Path) -> None:
    write_random_model(tmp_path / "single", _config(), 0, torch.bfloat16)
    write_random_model(tmp_path / "sharded", _config(), 0, torch.bfloat16, max_shard_bytes=50_000)

    index = json.loads((tmp_path / "sharded" / SAFETENSORS.index).read_text())
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    single = load_file(tmp_path / "single" / SAFETENSORS.single)

    assert len(files) > 2
    assert all(file.stat().st_size < 55_000 for file in files)
    assert set(index["weight_map"]) == set(single)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())
    assert all(torch.equal(tensors[name], single[name]) for name in single)
    assert load_original(tmp_path / "sharded").config.vocab_size == 320


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch; from pathlib import Path; from parallel.random_model import write_random_model\n"
        "torch.set_num_threads(1)\n"
        "sizes = dict(model_type='llama', hidden_size=512, intermediate_size=1024, num_attention_heads=8,"
        " max_position_embeddings=64)\n"
        "small = dict(sizes, vocab_size=32, num_hidden_layers=1); large = dict(sizes, vocab_size=200_000,"
        " num_hidden_layers=2)\n"
        "write_random_model(Path(sys.argv[1]) / 'small', small, 0, torch.bfloat16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_random_model(Path(sys.argv[1]) / 'large', large, 0, torch.bfloat16)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )

    model_kib = (tmp_path / "large" / SAFETENSORS.single).stat().st_size // 1024
    assert model_kib > 380_000
    assert int(result.stdout) < model_kib / 2


def test_tokenizer_comes_with_it(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tokenizer / "model.safetensors").write_text("not to be copied")
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": 1, "top_k": 5}')

    write_random_model(tmp_path / "model", _config(eos_token_id=None), 0, torch.float32, tokenizer)

    assert (tmp_path / "model" / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text()) == {
        "eos_token_id": [1, 2],
        "bos_token_id": 1,
        "do_sample": False,
    }
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == [1, 2]


def test_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; allowed: a new or an empty folder"):
        write_random_model(tmp_path, _config(), 0, torch.float32)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_what_was_written_of_a_model_is_taken_back_when_the_rest_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("parallel.random_model._write_json", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            write_random_model(tmp_path, _config(), 0, torch.float32)
    write_random_model(tmp_path, _config(), 0, torch.float32)
    assert (tmp_path / "config.json").is_file()


def test_what_cannot_be_made_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(UnsupportedModelError, match="model_type is 'bert'"):
        write_random_model(folder, _config("bert"), 0, torch.float32)
    with pytest.raises(ConfigError, match="config: hidden_size is 0"):
        write_random_model(folder, _config(hidden_size=0), 0, torch.float32)
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8; allowed: float32"):
        write_random_model(folder, _config(), 0, torch.int8)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        write_random_model(folder, _config(), 0, torch.float32, tmp_path)
    assert not folder.exists()
