"""The slopes of ALiBi, by the number of heads, as the families compute them. arXiv:2108.12409, section 3."""

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n) ... for n heads; past a power of two, every other slope of twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return tuple(slopes + between[: num_heads - power])


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """2^(-m/n), 2^(-2m/n) ... for m = `bias_max`; with n not a power of two, those of the next one in another order."""
    power = 1 << math.ceil(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
