"""What kernels may be asked for, as far as their device's name tells. Imports no torch."""

from parallel.description import DecoderDescription
from parallel.errors import DeviceError

NAMES = ("auto", "reference", "cpu", "cpu-native", "cuda")
SCALE_BYTES = 4
"""Size of the scale of a token's head, in a cache in 8 bits (int8_cache.py)."""


def check_choice(device: str, name: str, *, attention_backend: str = "auto", compiles: bool = False) -> None:
    """Check what goes together; see `select_kernels`.

    Args:
        device: its type, "cpu" or "cuda", with or without its index.

    Raises:
        DeviceError: the name is not known, its kernels do not run on the device, or do not go with the rest.
    """
    is_cpu = device.startswith("cpu")
    if name not in NAMES:
        raise DeviceError(f"kernels are {name!r}; allowed: {', '.join(NAMES)}")
    if name not in ("auto", "reference") and name.startswith("cpu") != is_cpu:
        allowed = ("auto", "reference", "cpu", "cpu-native") if is_cpu else ("auto", "reference", "cuda")
        raise DeviceError(f"kernels are {name!r} on device {device}; allowed there: {', '.join(allowed)}")
    if attention_backend != "auto" and (is_cpu or name == "reference"):
        raise DeviceError(
            f"attention backend is {attention_backend!r} with kernels {name!r} on {device}; allowed: auto"
        )
    if compiles and is_cpu and name not in ("reference", "cpu"):
        raise DeviceError(
            f"compile with kernels {name!r} on {device}, where a step is compiled already; "
            "allowed: kernels reference or cpu, or device cuda"
        )


def check_int8_cache(device: str, description: DecoderDescription, *, block_size: int) -> None:
    """Check that this model may have keys and values in 8 bits on a device.

    Args:
        device: its type, "cpu" or "cuda", with or without its index; "auto": not known yet.
        description: of the model.
        block_size: tokens in a block of the cache.

    Raises:
        DeviceError: its kernels do not have it, or the model's keys and values are not such.
    """
    if device != "auto" and not device.startswith("cpu"):
        raise DeviceError(
            f"the cache's dtype is 'int8' on {device}; allowed there: 'auto'. On a CPU it is allowed: the kernels "
            "for CUDA do not have it yet"
        )
    if description.latent_kv is not None:
        raise DeviceError(
            "the cache's dtype is 'int8', and the model keeps latents that are keys and values in one; allowed: 'auto'"
        )
    if block_size * description.head_dim % SCALE_BYTES:
        raise DeviceError(
            f"the cache's dtype is 'int8', block_size {block_size} and the size of a head {description.head_dim}; "
            f"allowed: a product that is a multiple of {SCALE_BYTES}, for the scales behind"
        )
