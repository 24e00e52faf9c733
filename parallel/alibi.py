"""ALiBi: what each head adds to the score of a key, by the position of the key. arXiv:2108.12409.

The paper adds -slope * (query - key). The softmax takes no notice of what all keys of a query share, so slope * key is
the same, and one row serves every query.
"""

import torch
from torch import Tensor

from parallel.position_description import Alibi


def key_bias(alibi: Alibi, heads: range, max_context: int, *, device: torch.device) -> Tensor:
    """float32 [N, max_context] for these heads of the model, on the device."""
    slopes_N = torch.tensor(alibi.slopes[heads.start : heads.stop], dtype=torch.float32)
    positions_P = torch.arange(max_context, dtype=torch.float32)
    if alibi.is_rounded:
        bias_NP = (slopes_N.bfloat16()[:, None] * positions_P.bfloat16()).float()
    else:
        bias_NP = slopes_N[:, None] * positions_P
    return (bias_NP * alibi.scale).to(device)
