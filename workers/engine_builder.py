"""From settings and a model folder to an engine whose ranks have their weights."""

import json
from pathlib import Path
from typing import Any

from weft.recording import Recorder

from parallel.checkpoint import Progress
from parallel.errors import ConfigError
from parallel.families.registry import describe_model
from parallel.position_description import MAX_INT32
from workers.config import EngineConfig
from workers.engine import Engine
from workers.rank import Rendezvous, lead_group
from workers.stats import RankStats
from workers.tokenizer import TokenTable, load_token_table


def build_engine(
    config: EngineConfig,
    *,
    rendezvous: Rendezvous | None = None,
    progress: Progress | None = None,
    rank_stats: RankStats | None = None,
    recorder: Recorder | None = None,
) -> Engine:
    """Load everything and return the engine of a group whose rank 0 is this process.

    Args:
        config: the same on all ranks.
        rendezvous: where the group's other ranks come; None when there are none.
        progress: called with the fraction of this rank's weights read so far.
        rank_stats: where to note what rank 0 does.
        recorder: where to write down what the scheduler decides; None: nowhere.

    Raises:
        ModelError, EngineConfigError: the model folder or the settings cannot be used.
        GroupFailedError: another rank could not start.
    """
    folder = Path(config.model)
    description = describe_model(folder)
    tokens = load_token_table(folder)
    eos_token_ids = read_eos_token_ids(folder, tokens)
    executor = lead_group(config, rendezvous=rendezvous, progress=progress, stats=rank_stats)
    return Engine(
        config,
        executor,
        tokens=tokens,
        eos_token_ids=eos_token_ids,
        max_context=config.max_context or description.max_context,
        vocab_size=description.vocab_size,
        recorder=recorder,
    )


def read_eos_token_ids(folder: Path, tokens: TokenTable) -> frozenset[int]:
    """Return the ids that end a text: those of the model's config and that of its tokenizer.

    Models finetuned for chat often have a token that ends a turn, which only the tokenizer's files name.
    """
    own = frozenset() if tokens.eos_token_id is None else frozenset([tokens.eos_token_id])
    return _read_config_eos_ids(folder) | own


def _read_config_eos_ids(folder: Path) -> frozenset[int]:
    """Return those of generation_config.json, else of config.json, else of its `text_config`."""
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    places = {
        "generation_config.json": _read_json(folder / "generation_config.json"),
        "config.json": config,
        "config.json: text_config": text_config if isinstance(text_config, dict) else {},
    }
    for place, values in places.items():
        ids = values.get("eos_token_id")
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(_is_token_id(each) for each in listed):
            raise ConfigError(f"{folder / place}: eos_token_id is {ids!r}; allowed: an id or a list of ids")
        return frozenset(listed)
    return frozenset()


def _is_token_id(value: object) -> bool:
    """Negative ones are ids that no token has."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT32


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content
