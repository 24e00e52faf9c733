"""Which device and which kernels a process gets, and what a CPU says of its memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from parallel import available_memory, control_groups
from parallel.description import DecoderDescription
from parallel.device.cpu import CpuDevice
from parallel.device.select import select_device
from parallel.errors import DeviceError
from parallel.kernels.choice import check_choice, check_int8_cache
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import select_kernels

CPU = torch.device("cpu")
MIB = 1 << 20


def test_cpu_knows_its_memory() -> None:
    device = CpuDevice()
    assert 0 < device.free_memory_bytes() <= device.total_memory_bytes()
    assert device.peak_memory_bytes() < device.total_memory_bytes()


def test_memory_is_the_containers_where_that_has_less_and_files_that_it_read_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice()
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    whole = device.total_memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{50 * MIB}\n")
    assert device.total_memory_bytes() == whole
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    assert (device.total_memory_bytes(), device.free_memory_bytes()) == (64 * MIB, 14 * MIB)
    (tmp_path / "memory.stat").write_text(f"anon {10 * MIB}\n\ninactive_file {30 * MIB}\nactive_file 9\n")
    assert device.free_memory_bytes() == 44 * MIB
    (tmp_path / "memory.current").write_text(f"{100 * MIB}\n")
    assert device.free_memory_bytes() == 0


def test_memory_is_that_of_the_unit_within_the_machine_that_has_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, own = tmp_path / "mount", tmp_path / "own"
    monkeypatch.setattr(control_groups, "_MOUNT", mount)
    monkeypatch.setattr(control_groups, "_OWN", own)
    own.write_text("0::/system.slice/weft.service\n")
    for group, limit, used in (("system.slice", 60, 10), ("system.slice/weft.service", 64, 20)):
        (mount / group).mkdir(parents=True)
        (mount / group / "memory.max").write_text(f"{limit * MIB}\n")
        (mount / group / "memory.current").write_text(f"{used * MIB}\n")
    device = CpuDevice()
    assert (device.total_memory_bytes(), device.free_memory_bytes()) == (60 * MIB, 44 * MIB)
    own.write_text("")
    assert device.total_memory_bytes() > 64 * MIB


def test_memory_is_the_machines_where_no_system_tells_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(available_memory, "_MEMORY_INFO", tmp_path / "meminfo")
    assert CpuDevice().free_memory_bytes() == CpuDevice().total_memory_bytes() > 0


def test_cpu_marks_are_moments() -> None:
    device = CpuDevice()
    first, second, third = device.mark(), device.mark(), device.mark()
    assert 0 <= second.seconds_since(first) <= third.seconds_since(first) < 60


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system cannot reset peaks")
def test_peak_memory_sees_what_was_freed_until_reset() -> None:
    device = CpuDevice()
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    torch.ones(64 * MIB, dtype=torch.uint8).sum()
    after = device.peak_memory_bytes()
    device.reset_peak_memory()
    assert after - before > 48 * MIB
    assert device.peak_memory_bytes() < after - 48 * MIB


@pytest.mark.parametrize(
    ("capability", "stored", "computed"),
    [
        ("AVX512", torch.float32, torch.float32),
        ("AVX512", torch.bfloat16, torch.bfloat16),
        ("AVX512", torch.float16, torch.float32),
        ("AVX2", torch.float32, torch.float32),
        ("AVX2", torch.bfloat16, torch.float32),
        ("AVX2", torch.float16, torch.float32),
    ],
)
def test_cpu_computes_in_the_dtype_of_the_checkpoint_unless_it_is_slow_in_it(
    capability: str, stored: torch.dtype, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert CpuDevice().default_dtype(stored) is computed


def test_cpu_is_selected_by_name_with_gloo() -> None:
    device = select_device("cpu")
    assert (device.torch_device, device.collective_backend) == (CPU, "gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_missing_gpu_is_refused_by_name_and_passed_over_by_auto() -> None:
    assert select_device("auto").torch_device == CPU
    with pytest.raises(DeviceError, match="this process sees no GPU"):
        select_device("cuda")


def test_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"'tpu'; allowed: auto, cpu, cuda"):
        select_device("tpu")


@pytest.mark.parametrize(
    ("device", "name", "kind"),
    [
        ("cpu", "cpu", CpuKernels),
        ("cpu", "reference", ReferenceKernels),
        ("cuda", "auto", CudaKernels),
        ("cuda", "cuda", CudaKernels),
        ("cuda", "reference", ReferenceKernels),
    ],
)
def test_kernels_are_selected_by_device_and_name(device: str, name: str, kind: type) -> None:
    kernels = select_kernels(torch.device(device), torch.float32, name)
    assert type(kernels) is kind
    assert kernels.name == (device if name == "auto" else name)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "fast", "kernels are 'fast'; allowed: auto, reference, cpu, cpu-native, cuda"),
        ("cpu", "cpu-fast", "kernels are 'cpu-fast'; allowed: auto, reference, cpu, cpu-native, cuda"),
        ("cuda", "cpu", "kernels are 'cpu' on device cuda; allowed there: auto, reference, cuda"),
        ("cuda", "cpu-native", "kernels are 'cpu-native' on device cuda; allowed there: auto, reference, cuda"),
        ("cpu", "cuda", "kernels are 'cuda' on device cpu; allowed there: auto, reference, cpu, cpu-native"),
    ],
)
def test_kernels_that_do_not_exist_there_are_refused(device: str, name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        select_kernels(torch.device(device), torch.float32, name)


def test_an_attention_backend_is_for_the_kernels_of_cuda() -> None:
    check_choice("cuda:0", "auto", attention_backend="triton")
    for device, name in (("cpu", "auto"), ("cuda", "reference")):
        with pytest.raises(DeviceError, match=f"'triton' with kernels '{name}' on {device}; allowed: auto"):
            select_kernels(torch.device(device), torch.float32, name, attention_backend="triton")


def test_layers_are_compiled_around_kernels_that_are_not() -> None:
    for device, name in (("cuda", "auto"), ("cuda", "reference"), ("cpu", "reference"), ("cpu", "cpu")):
        check_choice(device, name, compiles=True)


def described(**fields: object) -> DecoderDescription:
    return cast(DecoderDescription, SimpleNamespace(**({"latent_kv": None, "head_dim": 64} | fields)))


@pytest.mark.parametrize(
    ("description", "device", "block_size", "message"),
    [
        (described(), "cuda", 16, "dtype is 'int8' on cuda; allowed there: 'auto'. On a CPU it is allowed"),
        (described(latent_kv=object()), "cpu", 16, "keys and values in one; allowed: 'auto'"),
        (described(latent_kv=object()), "auto", 16, "keys and values in one; allowed: 'auto'"),
        (
            described(head_dim=18),
            "cpu",
            5,
            "block_size 5 and the size of a head 18; allowed: a product .* multiple of 4",
        ),
    ],
)
def test_where_8_bits_cannot_be_is_told(
    description: DecoderDescription, device: str, block_size: int, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        check_int8_cache(device, description, block_size=block_size)


def test_8_bits_may_be_asked_for_where_they_can_be() -> None:
    for device in ("cpu", "auto"):
        check_int8_cache(device, described(), block_size=16)
