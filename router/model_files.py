"""A model's files on a router's machine, where the model's folder is not: the controller gives those that are read.

So routers need no storage of their own, and no access to a hub. What is fetched is read at once and not kept on disk.
"""

import os
import tempfile
from pathlib import Path

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from router.config import RouterConfig
from router.errors import ModelFilesError
from router.model_text import ModelText
from router.tls import connect_blocking
from router.tokenizer import ModelTokenizer, is_alike

_TIMEOUT_S = 60.0
_MAX_BYTES = 256 << 20
"""Most bytes of a model's files together; the largest tokenizers have some 40 MB."""


class TokenizerLoader:
    """Reads the tokenizer of a revision from the folder that membership names, here or at the controller."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._channels: set[grpc.Channel] = set()
        """Channels over which files are fetched now."""
        self._is_closed = False

    def __call__(self, text: ModelText) -> ModelTokenizer:
        """Return the tokenizer. It blocks, and may be called from any thread.

        Raises:
            ModelFilesError: it cannot be had, also where the folder has other files now, or after `close`.
        """
        tokenizer = self._read(text.path)
        if text.digest and not is_alike(text.digest, tokenizer.digest):
            raise ModelFilesError(
                f"{text.path} has another tokenizer, chat template or generation config than when the model's replicas "
                f"were wanted; allowed: the same, or a rollout, which reads them anew"
            )
        return tokenizer

    def close(self) -> None:
        """Break off what is being fetched: the process ends only when no thread waits for it."""
        self._is_closed = True
        for channel in tuple(self._channels):
            channel.close()

    def _read(self, path: str) -> ModelTokenizer:
        control = self._config.control
        if control is None or os.access(path, os.R_OK | os.X_OK):  # else it is nowhere here, or another user's
            return ModelTokenizer.from_folder(path)
        with (
            tempfile.TemporaryDirectory(prefix="weft-model-") as folder,
            connect_blocking(control, self._config.link.tls) as channel,
        ):
            self._channels.add(channel)
            try:
                if self._is_closed:
                    raise ModelFilesError(f"the router stops; the files of {path} are not fetched")
                fetch_model_files(path, Path(folder), channel, control=control)
                return ModelTokenizer.from_folder(folder)
            except ModelFilesError as error:
                raise ModelFilesError(str(error).replace(folder, path)) from error
            finally:
                self._channels.discard(channel)


def fetch_model_files(path: str, folder: Path, channel: grpc.Channel, *, control: str) -> None:
    """Write the files of a served model into an empty folder.

    Args:
        path: of the model's folder, as membership names it.
        folder: where to write.
        channel: to the controller.
        control: its host:port, for messages.

    Raises:
        ModelFilesError: the controller does not give them; the message says why.
    """
    num_bytes = 0
    request = control_pb2.GetModelFilesRequest(path=path)
    try:
        for part in ControlStub(channel).GetModelFiles(request, timeout=_TIMEOUT_S):
            num_bytes += len(part.data)
            if num_bytes > _MAX_BYTES:
                raise ModelFilesError(f"the files of {path} have more than {_MAX_BYTES >> 20} MB, which is allowed")
            if Path(part.name).name != part.name:
                raise ModelFilesError(f"a file of {path} is called {part.name!r}; allowed: a name without a folder")
            with (folder / part.name).open("ab") as file:
                file.write(part.data)
    except grpc.RpcError as error:
        raise ModelFilesError(
            f"{path} cannot be read on this machine, and the controller at {control} did not give its files: "
            f"{error.code().name}: {error.details()}"
        ) from error
