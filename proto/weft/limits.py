"""What a request may ask for at most. The router refuses more with the client's own words, the engine in any case."""

MAX_TEMPERATURE = 1e36
"""With much more the product with a draw's noise could be infinite in float32."""
MAX_LOGPROBS = 20
"""Alternatives at each token."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TIMEOUT_S = 1e9
"""Longest deadline: gRPC takes a later one for one that has passed."""
