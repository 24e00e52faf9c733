"""Eight-bit floats with one scale for each tile of 128 x 128 numbers, as DeepSeek V3 is published: arXiv:2412.19437,
section 3.3."""

from torch import Tensor

from parallel.quantization.packing import Slice, Stored

TILE_SIZE = 128


class Fp8TilePacking:
    """`name` itself in eight bits, and beside it `name`_scale_inv, which its tiles are multiplied with."""

    def stored(self, name: str, shape: tuple[int, int]) -> tuple[Stored, Stored]:
        """See `Packing`. The last tiles are cut off where the matrix ends."""
        num_row_tiles, num_column_tiles = (-(-size // TILE_SIZE) for size in shape)
        return (
            Stored(name, shape, ("F8_E4M3",)),
            Stored(f"{name}_scale_inv", (num_row_tiles, num_column_tiles), ("F32",)),
        )

    def read(self, values: Slice, scales: Slice, rows: range, columns: range) -> Tensor:
        """See `Packing`."""
        numbers = values[slice(rows.start, rows.stop), slice(columns.start, columns.stop)].float()
        return numbers.mul_(_spread(_spread(scales[_tiles(rows), _tiles(columns)], rows, 0), columns, 1))


def _tiles(part: range) -> slice:
    return slice(part.start // TILE_SIZE, -(-part.stop // TILE_SIZE))


def _spread(scales: Tensor, part: range, dim: int) -> Tensor:
    """Each tile's scale, for every row or column of a part that begins somewhere in the first tile."""
    offset = part.start % TILE_SIZE
    return scales.repeat_interleave(TILE_SIZE, dim).narrow(dim, offset, len(part))
