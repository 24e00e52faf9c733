"""What is raised for a folder whose tokenizer cannot be read; router and engine give it their own types.

TokenizerError    a file is missing or broken, or asks for something that is not known; the message names it
"""


class TokenizerError(Exception):
    """A folder has no tokenizer that can be read; the message names the file, what was seen and what is allowed."""
