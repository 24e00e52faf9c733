"""What can be refused before any process starts: the model's folder, its split over ranks, its kernels, taken ports.

Imports no torch. Weights are checked by the ranks, which tell the controller what is wrong with them.
"""

import errno
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

from weft.addresses import family_of
from weft.recording import RecordingConfig

from cluster.config import ClusterSpec, ModelSpec
from cluster.errors import ModelNotFoundError, StartError
from cluster.models import find_folder, resolve_model
from cluster.revision_files import RevisionText, digest_files, find_files
from parallel.errors import DeviceError, ParallelismError
from parallel.families.registry import describe_model
from parallel.kernels.choice import check_choice, check_int8_cache
from parallel.shard import check_split
from router.config import RouterConfig
from router.errors import ModelFilesError, RouterConfigError
from router.keys import check_keys
from router.spans import check_tracing
from workers.errors import EngineConfigError


def check_spec(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with folders and the router's files made absolute.

    Raises:
        ModelNotFoundError, ModelError, EngineConfigError: a model cannot be had, described or split as wanted.
        StartError: a port is taken, the folder of recordings cannot be made, tracing is on and not installed, or
            files of TLS or API keys cannot be used.
    """
    models = tuple(check_model(model) for model in spec.models)
    try:
        check_tracing(spec.router.tracing)
        if spec.inner_tls is not None:
            spec.inner_tls.check(serves=True)
        if spec.router.tls is not None:
            spec.router.tls.check()
        if spec.router.api_keys is not None:
            check_keys(Path(spec.router.api_keys))
    except RouterConfigError as error:
        raise StartError(str(error)) from error
    if spec.ray_address is None:
        _check_ports(spec)
        _check_recording(spec.router.recording)
    return replace(spec, models=models, router=_with_absolute_files(spec.router))


def check_model(model: ModelSpec) -> ModelSpec:
    """Return the model with its folder made absolute.

    Raises:
        ModelNotFoundError, ModelError: it cannot be had or described; the message names the folder.
        EngineConfigError: it cannot be split or computed as wanted; the message names the model.
    """
    folder = resolve_model(model.source)
    description = describe_model(folder)
    engine = model.engine
    parallel, wanted = engine.parallel, engine.max_context
    try:
        check_split(
            description,
            tensor_parallel=parallel.tensor_parallel,
            pipeline_parallel=parallel.pipeline_parallel,
            layer_partition=parallel.layer_partition,
            expert_parallel=parallel.expert_parallel,
        )
        if engine.device != "auto":
            check_choice(
                engine.device, engine.kernels, attention_backend=engine.attention_backend, compiles=engine.compile
            )
        if engine.cache.dtype == "int8":
            check_int8_cache(engine.device, description, block_size=engine.cache.block_size)
    except (ParallelismError, DeviceError) as error:
        raise EngineConfigError(f"model {model.name!r}: {error}") from error
    if wanted is not None and wanted > description.max_context:
        raise EngineConfigError(
            f"model {model.name!r}: max_context is {wanted}; allowed: at most that of the model, "
            f"{description.max_context}"
        )
    if find_folder(model.source) is not None:
        # The name is kept where it is the last part of the path, which may be another one now.
        section = model.section.model_copy(update={"path": str(folder), "name": model.name})
        return section.to_spec(model.engine.hash_key)
    return model


def read_text(model: ModelSpec, *, before: RevisionText | None = None) -> RevisionText:
    """Return what routers and ranks must know of a model. Reads its folder; fetches it first where it comes from a hub.

    Args:
        model: what was wanted.
        before: of a revision that was wanted before, whose commit of the hub's repository it is; None: the last one.

    Raises:
        ModelNotFoundError, ModelError: it cannot be had or described, or no router could read its tokenizer.
    """
    from router.tokenizer import ModelTokenizer  # what starts a service reads none: its controller does

    folder = find_files(model.source, before)
    max_context = describe_model(folder).max_context
    try:
        tokenizer = ModelTokenizer.from_folder(folder)
    except ModelFilesError as error:
        raise ModelNotFoundError(f"model {model.name!r} cannot be served: {error}") from error
    return RevisionText(
        path=str(folder),
        max_context=min(max_context, model.engine.max_context or max_context),
        digest=tokenizer.digest,
        files=digest_files(folder),
    )


def _with_absolute_files(router: RouterConfig) -> RouterConfig:
    """Return the settings with absolute paths: on a Ray cluster the router runs in another folder."""
    tls = router.tls
    if tls is not None:
        tls = replace(tls, **{name: os.path.abspath(path) for name, path in asdict(tls).items() if path is not None})
    api_keys = None if router.api_keys is None else os.path.abspath(router.api_keys)
    return replace(router, tls=tls, api_keys=api_keys)


def _check_ports(spec: ClusterSpec) -> None:
    for name, port in spec.file.ports.items():
        try:
            _bind(spec.host, port or 0)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise StartError(
                    f"{name}: {port} on {spec.host} is taken; allowed: a free port, or 0 for any"
                ) from error
            raise StartError(
                f"host: {spec.host!r} with {name} {port}: {error}; allowed: an address of this node"
            ) from error


def _check_recording(recording: RecordingConfig) -> None:
    if recording.folder is None:
        return
    try:
        Path(recording.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"recording.folder: {recording.folder} cannot be made: {error.strerror}; allowed: a folder"
        ) from error


def _bind(host: str, port: int) -> None:
    """Bind a port and let it go. Raises OSError, or ValueError for a host that is no name."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
