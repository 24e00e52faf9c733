"""What a rank holds while it loads: never more than its own weights and a tenth, pages of mapped files included."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.random_model import write_random_model
from parallel.weight_index import PICKLED, SAFETENSORS

REPOSITORY = Path(__file__).resolve().parents[3]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 6144,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 18,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}

RANK = """
import json, sys
from pathlib import Path
import torch
from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.families.registry import describe_model
from parallel.host_memory import release_free_memory
from parallel.kernels.select import select_kernels
from parallel.mesh import Axis, Mesh

small, large, tp_size, dtype = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
torch.set_num_threads(1)
device = torch.device("cpu")
kernels = select_kernels(device, dtype)
mesh = Mesh(tp=Axis(size=tp_size, rank=tp_size - 1), pp=Axis(size=1, rank=0))

def status():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}

load_decoder(small, mesh=mesh, device=device, dtype=dtype, kernels=kernels)  # what is loaded once: libraries, threads
shape = Decoder(describe_model(large), mesh=mesh, device=torch.device("meta"), dtype=dtype, kernels=kernels)
own = sum(parameter.tensor.nbytes for parameter in shape.sharded_parameters())
release_free_memory()
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
before = status()
decoder = load_decoder(large, mesh=mesh, device=device, dtype=dtype, kernels=kernels)
after = status()
peak, kept = after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"]
print(json.dumps({"own": own, "peak": peak, "kept": kept}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 350 MB in float32, and a small one, in both formats; others in one."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {
        "small": {"num_hidden_layers": 1, "vocab_size": 64},
        "large": {},
        "tied": {"tie_word_embeddings": True, "vocab_size": 2 * 6144},
    }
    for name, values in sizes.items():
        write_random_model(folder / f"{name}-safetensors", CONFIG | values, 0, torch.float32)
    for name in ("small", "large"):
        tensors = _begin_copy(folder / f"{name}-safetensors", folder / f"{name}-bin")
        torch.save(tensors, folder / f"{name}-bin" / PICKLED.single)
    tensors = _begin_copy(folder / "tied-safetensors", folder / "stored-twice-safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "stored-twice-safetensors" / SAFETENSORS.single)
    return folder


def _begin_copy(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A new folder with the config of that model, whose tensors are to be written there."""
    folder.mkdir()
    shutil.copy2(source / "config.json", folder)
    return load_file(source / SAFETENSORS.single)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak of memory")
@pytest.mark.parametrize(
    ("name", "form", "tp_size", "dtype"),
    [
        ("large", "safetensors", 1, "float32"),
        ("large", "safetensors", 2, "bfloat16"),
        ("large", "bin", 1, "bfloat16"),
        ("large", "bin", 2, "float32"),
        ("large", "bin", 2, "bfloat16"),
        ("tied", "safetensors", 1, "bfloat16"),
        ("stored-twice", "safetensors", 1, "bfloat16"),
    ],
)
def test_peak_is_the_ranks_own_weights_and_a_tenth(
    models: Path, name: str, form: str, tp_size: int, dtype: str
) -> None:
    arguments = [models / f"small-{form}", models / f"{name}-{form}", str(tp_size), dtype]
    command = [sys.executable, "-c", RANK, *arguments]

    result = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=300)

    seen = json.loads(result.stdout)
    itemsize = getattr(torch, dtype).itemsize
    assert seen["own"] == pytest.approx(350e6 * itemsize / 4 / tp_size, rel=0.01)
    assert seen["own"] * 0.9 < seen["peak"] < seen["own"] * 1.1, seen
