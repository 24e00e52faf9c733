"""ALiBi: what each head adds to the score of a key. arXiv:2108.12409.

The paper adds -slope * (query - key), and one row serves every query: it is read from where the query's own key has the
last column. slope * key would be the same to a softmax, but not in float32: at 32,000 tokens scores would be thousands,
off by a thousandth. Falcon was trained so, and its rounded products are of positions.
"""

import torch
from torch import Tensor

from parallel.position_description import Alibi


def key_bias(alibi: Alibi, heads: range, max_context: int, *, device: torch.device) -> Tensor:
    """float32 [N, max_context] for these heads of the model, on the device; columns as in `AttentionParams`."""
    slopes_N = torch.tensor(alibi.slopes[heads.start : heads.stop], dtype=torch.float32)
    positions_P = torch.arange(max_context, dtype=torch.float32)
    if alibi.is_rounded:
        bias_NP = (slopes_N.bfloat16()[:, None] * positions_P.bfloat16()).float()
    else:
        bias_NP = slopes_N[:, None] * (positions_P - (max_context - 1))
    return (bias_NP * alibi.scale).to(device)
