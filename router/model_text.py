"""From which files text becomes tokens for a replica: their folder, and what was in them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The tokenizer, chat template and generation defaults of one revision of a model."""

    path: str
    """Folder that holds them."""
    digest: str = ""
    """Digest of the files' contents when the revision was wanted; empty: not known, and `path` stands for it."""
    revision: int = 0
    """Revision of the model; a larger one is newer."""

    @property
    def identity(self) -> str:
        """A key that two of these share only where they make equal tokens of a text."""
        return self.digest or self.path

    def is_like(self, other: "ModelText") -> bool:
        """Whether a request made for one may go to a replica that runs the other."""
        return self.identity == other.identity
