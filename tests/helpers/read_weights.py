"""Weights of a decoder as they are read, to be compared with those of the files."""

from pathlib import Path

import pytest

from parallel import checkpoint
from parallel.decoder import Decoder


def read_weights(decoder: Decoder, folder: Path) -> int:
    """Fill the parameters and lay none of them out for the kernels; return the bytes read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_lay_out", lambda finish: None)
        return checkpoint.load_weights(decoder, folder)
