"""The models that are wanted now, and how operators and the autoscaler change them, each change checked first.

What a change means is said in wanted.py, pure; here models are read, off the event loop, and what others change
meanwhile is not lost. wanted_state.py brings about what is wanted.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cluster.config import ModelSection, ModelSpec, check_section
from cluster.errors import ClusterConfigError, StoppingError
from cluster.preflight import check_model, read_text
from cluster.revision_files import RevisionText
from cluster.state_messages import LastScaling
from cluster.wanted import (
    Change,
    ChangeKind,
    Models,
    apply,
    changed_section,
    find,
    roll,
    scale,
    undo,
    with_ready,
    with_texts,
)

logger = logging.getLogger(__name__)

BY_OPERATOR = "by an operator"
"""Why a number of replicas changes, where no autoscaler says so."""

_MAX_CHECKS = 5
"""How often one rollout reads its model, off the event loop: again whenever somebody has changed it meanwhile."""
_MAX_READERS = 16

T = TypeVar("T")


class WantedModels:
    """All models that are wanted. Methods are called on one event loop."""

    def __init__(
        self,
        saved: Models,
        *,
        next_revisions: Mapping[str, int],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Go on from what was saved.

        Args:
            saved: what a controller before wanted; folders that it has not read are read now, which blocks.
            next_revisions: numbers with which models begin that were served under it and are no longer.
            on_change: saves what is wanted; a change is made when it returns.
            clock: monotonic seconds.
        """
        unread = {name: model for name, model in saved.items() if model.current.text is None}
        self.current = with_texts(saved, {name: read_text(model.spec) for name, model in unread.items()}, before={})
        self.next_revisions = dict(next_revisions)
        self.scalings: dict[str, LastScaling] = {}
        """Last scaling of each model under this controller."""
        self._is_closed = False
        self._readers = ThreadPoolExecutor(_MAX_READERS, "models")
        """Threads of their own: a file system that hangs keeps them, and groups are placed all the same."""
        self._on_change = on_change
        self._clock = clock

    def close(self) -> None:
        """Refuse every change from now on, those that are being checked too: the service is being stopped."""
        self._is_closed = True

    def sections(self) -> Mapping[str, ModelSection]:
        """The settings of every wanted model, with the number of replicas wanted now."""
        return {name: model.current.section for name, model in self.current.items()}

    async def apply(self, specs: Sequence[ModelSpec], *, dry_run: bool = False) -> list[Change]:
        """Want exactly these models; say what that changes.

        Raises:
            ModelNotFoundError, ModelError, EngineConfigError: a model cannot be had, described or split as wanted.
            ClusterConfigError: what would be kept of it cannot be read again.
            StoppingError: after `close`.
        """
        self.check_open()
        checked = await self._read(lambda: [check_model(spec) for spec in specs])
        texts = await self._read(lambda: {spec.name: read_text(spec) for spec in checked})
        wanted, changes = apply(self.current, checked, next_revisions=self.next_revisions)
        if changes and not dry_run:
            self._want(with_texts(wanted, texts, before=self.current), changes)
        return changes

    def scale(self, name: str, replicas: int, *, reason: str = BY_OPERATOR) -> int:
        """Want so many replicas of a model, for a reason; return how many were wanted before.

        Raises:
            NotServedError: there is no such model.
            ClusterConfigError: outside the model's bounds.
            StoppingError: after `close`.
        """
        self.check_open()
        before = find(self.current, name)
        if before.replicas != replicas:
            text = f"{before.replicas} -> {replicas}: {reason}"
            change = Change(kind=ChangeKind.SCALE, name=before.name, details=(text,))
            self._want(scale(self.current, name, replicas), [change], reason=reason)
        return before.replicas

    async def roll(self, name: str, settings: Mapping[str, Any]) -> tuple[Change, int]:
        """Replace a model's groups by ones with these settings changed; return what that means and the revision.

        Raises:
            NotServedError: there is no such model.
            ClusterConfigError: a setting is unknown or wrong, or others change the model all the while.
            ModelNotFoundError, ModelError, EngineConfigError: the model cannot be had, described or split as wanted.
            StoppingError: after `close`.
        """
        self.check_open()
        for _ in range(_MAX_CHECKS):
            spec = self._changed_spec(name, settings)
            checked = await self._read(partial(check_model, spec))
            text = await self._read(partial(read_text, checked))
            if self._changed_spec(name, settings) == spec:
                return self._want_revision(*roll(self.current, name, checked.section), text)
        raise _changes_too_often(name)

    async def undo(self, name: str) -> tuple[Change, int]:
        """Go back to a model's revision before; as `roll`."""
        self.check_open()
        for _ in range(_MAX_CHECKS):
            spec = _current_spec(*undo(self.current, name))
            last = find(self.current, name).previous
            text = await self._read(partial(read_text, spec, before=last.text if last else None))
            models, change = undo(self.current, name)
            if _current_spec(models, change) == spec:
                return self._want_revision(models, change, text)
        raise _changes_too_often(name)

    def note_ready(self, ready: Iterable[tuple[str, int]]) -> bool:
        """Note which revisions of which models were READY; return whether that is news, which the caller saves."""
        before = self.current
        for name, number in ready:
            if (model := self.current.get(name)) and (noted := with_ready(model, number)) is not model:
                self.current = {**self.current, name: noted}
        return self.current is not before

    def check_open(self) -> None:
        """Raise StoppingError after `close`."""
        if self._is_closed:
            raise StoppingError("the service is stopping; allowed: `weft drain`, and changes when it serves again")

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _want(self, wanted: Models, changes: Sequence[Change], *, reason: str = BY_OPERATOR) -> None:
        self.check_open()  # others went on while models were read
        for model in wanted.values():
            check_section(model.current.section)  # what is saved must be read by a successor
        removed = self.current.keys() - wanted.keys()
        self.next_revisions |= {name: self.current[name].next_number for name in removed}
        self.scalings = {name: scaling for name, scaling in self.scalings.items() if name in wanted}
        for name, model in wanted.items():
            before = self.current.get(name, model).replicas
            if before != model.replicas:  # other bounds have an effect on it as well
                text = f"{before} -> {model.replicas}: {reason}"
                self.scalings[name] = LastScaling(text=text, time_s=self._clock())
        self.current = dict(wanted)
        for change in changes:
            details = "; ".join(change.details)
            logger.info("%s %s%s", change.kind, change.name, details and f": {details}")
        self._on_change()

    def _want_revision(self, wanted: Models, change: Change, text: RevisionText) -> tuple[Change, int]:
        self._want(with_texts(wanted, {change.name: text}, before=self.current), [change])
        return change, self.current[change.name].current.number

    def _changed_spec(self, name: str, settings: Mapping[str, Any]) -> ModelSpec:
        model = find(self.current, name)
        return changed_section(model, settings).to_spec(model.hash_key)


def _current_spec(models: Models, change: Change) -> ModelSpec:
    return models[change.name].spec


def _changes_too_often(name: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"{name} was changed by others each of the {_MAX_CHECKS} times that it was read; try again"
    )
