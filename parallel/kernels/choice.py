"""What kernels may be asked for, as far as their device's name tells. Imports no torch."""

from parallel.errors import DeviceError

NAMES = ("auto", "reference", "cpu", "cpu-native", "cuda")


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
