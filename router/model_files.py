"""A model's files on a router's machine, where the model's folder is not: the controller gives those that are read.

So routers need no storage of their own, and no access to a hub. What is fetched is read at once and not kept on disk.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from router.config import RouterConfig
from router.errors import ModelFilesError
from router.model_text import ModelText
from router.tls import InnerTls, connect_blocking
from router.tokenizer import ModelTokenizer, is_alike

_TIMEOUT_S = 60.0
_MAX_BYTES = 256 << 20
"""Of a model's files; the largest tokenizers have some 40 MB."""


def tokenizer_loader(config: RouterConfig) -> Callable[[ModelText], ModelTokenizer]:
    """Return what reads a revision's tokenizer from the folder that membership names, here or at the controller.

    It blocks, may be called from any thread, and raises ModelFilesError, also where the folder has other files now.
    """

    def load(text: ModelText) -> ModelTokenizer:
        tokenizer = read(text.path)
        if text.digest and not is_alike(text.digest, tokenizer.digest):
            raise ModelFilesError(
                f"{text.path} has another tokenizer, chat template or generation config than when the model's replicas "
                f"were wanted; allowed: the same, or a rollout, which reads them anew"
            )
        return tokenizer

    def read(path: str) -> ModelTokenizer:
        if config.control is None or Path(path).is_dir():
            return ModelTokenizer.from_folder(path)
        with tempfile.TemporaryDirectory(prefix="weft-model-") as folder:
            fetch_model_files(path, Path(folder), control=config.control, tls=config.link.tls)
            try:
                return ModelTokenizer.from_folder(folder)
            except ModelFilesError as error:
                raise ModelFilesError(str(error).replace(folder, path)) from error

    return load


def fetch_model_files(path: str, folder: Path, *, control: str, tls: InnerTls | None = None) -> None:
    """Write the files of a served model into an empty folder.

    Args:
        path: of the model's folder, as membership names it.
        folder: where to write.
        control: host:port of the controller.
        tls: of the connection to it.

    Raises:
        ModelFilesError: the controller does not give them; the message says why.
    """
    num_bytes = 0
    request = control_pb2.GetModelFilesRequest(path=path)
    try:
        with connect_blocking(control, tls) as channel:
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
            f"{path} is not on this machine, and the controller at {control} did not give its files: "
            f"{error.code().name}: {error.details()}"
        ) from error
