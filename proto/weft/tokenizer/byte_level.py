"""The 256 bytes as printable characters, as byte-level vocabularies write them since GPT-2."""


def _char_of_byte() -> tuple[str, ...]:
    """Printable Latin-1 characters stand for themselves, the other bytes for the characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


CHAR_OF_BYTE = _char_of_byte()
"""The character that stands for each byte."""

BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
"""The reverse."""


def as_chars(data: bytes) -> str:
    """Return bytes as the characters that stand for them."""
    return "".join(CHAR_OF_BYTE[byte] for byte in data)
