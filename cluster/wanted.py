"""What a cluster should run, as plain values, and what operators may change of it: apply, scale, roll, undo.

Pure: every function takes the models as they are wanted and returns them as they are wanted next. Which groups that
means is decided in plan_groups.py; wanted_models.py keeps them, wanted_state.py brings them about.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from cluster.config import ClusterFile, ModelSection, ModelSpec, build_section, check_replicas
from cluster.errors import ClusterConfigError, NotServedError
from cluster.revision_files import RevisionText, is_alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One version of a model's settings; groups are of one revision for life."""

    number: int
    """Unique among the model's revisions; the first one is 1."""
    section: ModelSection
    """Complete settings, with the name and, where there is one, the absolute folder."""
    text: RevisionText | None = None
    """What its folder holds; None: not read yet, as it just became current, or saved by a version that kept none."""
    was_ready: bool = False
    """Whether a group of it was READY at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """One model that should be served. How many replicas, the current revision's section says."""

    hash_key: bytes
    """Key of the block hashes, the same for all revisions, so that a router's prefix index spans a rollout."""
    current: Revision
    previous: Revision | None = None
    """The revision that undo goes back to: the last one before that was READY, where one was."""
    next_number: int = 2
    """Number of the next new revision."""

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.current.section.served_name

    @property
    def replicas(self) -> int:
        """Replicas wanted now."""
        return self.current.section.replicas

    @property
    def spec(self) -> ModelSpec:
        """What a new group runs."""
        return self.current.section.to_spec(self.hash_key)


Models = Mapping[str, WantedModel]
"""Models by name."""


class ChangeKind(StrEnum):
    """What a change does to a model."""

    ADD = "add"
    REMOVE = "remove"
    SCALE = "scale"
    """Another number of replicas, or other bounds of it; no group is replaced."""
    ROLLOUT = "rollout"
    """Other settings: every group is replaced."""
    IGNORED = "ignored"
    """Other settings of a section of the file that cannot change while the service runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between what is wanted and what somebody wants now."""

    kind: ChangeKind
    name: str
    details: tuple[str, ...] = ()
    """A line for each setting."""


_SCALING = ("replicas", "min_replicas", "max_replicas", "autoscaling")
"""Settings that no rank knows of."""


def apply(
    models: Models, specs: Sequence[ModelSpec], *, next_revisions: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, WantedModel], list[Change]]:
    """Want exactly these models; also say what that changes. Applied again, it changes nothing.

    Settings that are those of the revision before go back to it, so its groups that still run are kept. The number of
    replicas of a model that scales by itself stays as it is, but for its bounds. A model that is added begins with its
    number of `next_revisions`, where it was served before: groups of then, which may live yet, are of older revisions.
    """
    wanted: dict[str, WantedModel] = {}
    changes: list[Change] = []
    for spec in specs:
        section = spec.section.model_copy(update={"name": spec.name})
        before = models.get(spec.name)
        if before is None:
            first = Revision(number=next_revisions.get(spec.name, 1), section=section)
            wanted[spec.name] = WantedModel(hash_key=spec.engine.hash_key, current=first, next_number=first.number + 1)
            changes.append(Change(kind=ChangeKind.ADD, name=spec.name, details=(_shape(section),)))
            continue
        section = _with_replicas_of(before, section)
        wanted[spec.name] = _revise(before, section)
        kind = ChangeKind.SCALE if wanted[spec.name].current.number == before.current.number else ChangeKind.ROLLOUT
        if details := differences(before.current.section, section):
            changes.append(Change(kind=kind, name=spec.name, details=details))
    changes += [Change(kind=ChangeKind.REMOVE, name=name) for name in models if name not in wanted]
    return wanted, changes


def ignored(started: ClusterFile, file: ClusterFile) -> list[Change]:
    """Say which sections a file gives otherwise than they were at the start of the service, which alone reads them."""
    before, after = started.model_dump(mode="json"), file.model_dump(mode="json")
    names = [name for name in after if name in file.model_fields_set and name != "models"]
    details = {name: tuple(_compare({name: before[name]}, {name: after[name]})) for name in names}
    return [Change(kind=ChangeKind.IGNORED, name=name, details=lines) for name, lines in details.items() if lines]


def with_texts(models: Models, texts: Mapping[str, RevisionText], *, before: Models) -> dict[str, WantedModel]:
    """Return the models with what was read of the folders of those whose revision has just become the current one.

    A revision that comes back to other files than it had before becomes a new one: its groups that still run have the
    old ones.
    """
    return {
        name: model if model.current.text else _with_text(model, texts[name], before.get(name))
        for name, model in models.items()
    }


def scale(models: Models, name: str, replicas: int) -> dict[str, WantedModel]:
    """Want so many replicas of a model.

    Raises:
        NotServedError: there is no such model.
        ClusterConfigError: outside the model's bounds.
    """
    model = find(models, name)
    try:
        check_replicas(model.current.section, replicas)
    except ValueError as error:
        raise ClusterConfigError(f"{model.name}: {error}") from error
    section = model.current.section.model_copy(update={"replicas": replicas})
    return {**models, model.name: replace(model, current=replace(model.current, section=section))}


def roll(models: Models, name: str, section: ModelSection) -> tuple[dict[str, WantedModel], Change]:
    """Want every group of a model replaced by one with these settings, equal ones too: weights are read anew.

    Raises NotServedError.
    """
    model = find(models, name)
    details = differences(model.current.section, section) or ("the same settings, weights read anew",)
    change = Change(kind=ChangeKind.ROLLOUT, name=model.name, details=details)
    return {**models, model.name: _add_revision(model, section)}, change


def undo(models: Models, name: str) -> tuple[dict[str, WantedModel], Change]:
    """Go back to the last revision that was READY, with as many replicas as now; undone again, it goes forward.

    Raises:
        NotServedError: there is no such model.
        ClusterConfigError: it has had one revision only.
    """
    model = find(models, name)
    if model.previous is None:
        raise ClusterConfigError(f"{model.name} has had one revision only; allowed: undo after a rollout")
    back = replace(model, current=_scaled_like(model.previous, model.current), previous=model.current)
    details = differences(model.current.section, back.current.section) or ("the weights of the revision before",)
    return {**models, model.name: back}, Change(kind=ChangeKind.ROLLOUT, name=model.name, details=details)


def with_ready(model: WantedModel, number: int) -> WantedModel:
    """Return the model with its revision of this number marked as READY once; the same one where nothing is new."""
    current, previous = model.current, model.previous
    if current.number == number and not current.was_ready:
        return replace(model, current=replace(current, was_ready=True))
    if previous is not None and previous.number == number and not previous.was_ready:
        return replace(model, previous=replace(previous, was_ready=True))
    return model


def changed_section(model: WantedModel, settings: Mapping[str, Any]) -> ModelSection:
    """Return the model's section with some settings changed, nested ones by a nested mapping.

    Raises:
        ClusterConfigError: a setting is unknown or wrong, or is the name, which cannot change.
    """
    if "name" in settings:
        raise ClusterConfigError("name: cannot change in a rollout; add a model of the new name instead")
    return build_section(_merge(model.current.section.model_dump(mode="json"), settings))


def differences(before: ModelSection, after: ModelSection) -> tuple[str, ...]:
    """Say which settings differ, a line each: "cache.num_blocks: 512 -> 1024"."""
    return tuple(_compare(before.model_dump(mode="json"), after.model_dump(mode="json")))


def find(models: Models, name: str) -> WantedModel:
    """Return the model of this name; the empty name is the only model served. Raises NotServedError."""
    if not name and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        served = ", ".join(repr(served) for served in sorted(models)) or "none"
        raise NotServedError(f"model is {name!r}; served: {served}")
    return models[name]


def _revise(model: WantedModel, section: ModelSection) -> WantedModel:
    """Return the model with this section: scaled, back at its revision before, or with a new one."""
    if _settings(section) == _settings(model.current.section):
        return replace(model, current=replace(model.current, section=section))
    if model.previous is not None and _settings(section) == _settings(model.previous.section):
        return replace(model, current=replace(model.previous, section=section, text=None), previous=model.current)
    return _add_revision(model, section)


def _add_revision(model: WantedModel, section: ModelSection) -> WantedModel:
    revision = Revision(number=model.next_number, section=section)
    last, current = model.previous, model.current
    keeps_last = last is not None and last.was_ready and not current.was_ready  # a rollout that failed or was cut short
    previous = last if keeps_last else current
    return replace(model, current=revision, previous=previous, next_number=model.next_number + 1)


def _with_text(model: WantedModel, text: RevisionText, before: WantedModel | None) -> WantedModel:
    read = replace(model, current=replace(model.current, text=text))
    last = before.previous if before else None
    if last is None or last.number != model.current.number or last.text is None or is_alike(last.text, text):
        return read
    renumbered = replace(read.current, number=model.next_number, was_ready=False)
    return replace(read, current=renumbered, next_number=model.next_number + 1)


def _settings(section: ModelSection) -> ModelSection:
    defaults = {name: ModelSection.model_fields[name].default for name in _SCALING}
    return section.model_copy(update=defaults)


def _with_replicas_of(model: WantedModel, section: ModelSection) -> ModelSection:
    """Return the section with the wanted number: a file's counts where a model begins, then the autoscaler's does."""
    if section.autoscaling is None:
        return section
    assert section.max_replicas is not None
    replicas = min(max(model.replicas, section.min_replicas), section.max_replicas)
    return section.model_copy(update={"replicas": replicas})


def _scaled_like(revision: Revision, other: Revision) -> Revision:
    scaling = {name: getattr(other.section, name) for name in _SCALING}
    return replace(revision, section=revision.section.model_copy(update=scaling), text=None)


def _shape(section: ModelSection) -> str:
    split = f"tensor parallel {section.tensor_parallel}, pipeline {section.pipeline_parallel}"
    return f"{section.replicas} x ({split}) of {section.path}"


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            yield from _compare(before, value, f"{prefix}{key}.")
        elif before != value:
            yield f"{prefix}{key}: {_shown(before)} -> {_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return "default" if value is None else str(value)
