"""docs/models.md says what the tests prove, and every family is proven."""

import re

import pytest
from helpers.support_matrix import DOCUMENT, REPOSITORY, collect_test_ids, embed, render

from parallel.families.registry import FAMILIES

SHAPES = ("1-1", "2-1", "1-2", "2-2")


@pytest.fixture(scope="module")
def test_ids() -> list[str]:
    return collect_test_ids()


def test_support_matrix_is_fresh(test_ids: list[str]) -> None:
    document = DOCUMENT.read_text()
    assert embed(document, render(test_ids)) == document, "make it anew: cd tests && python -m helpers.support_matrix"


def test_every_family_is_proven_in_every_shape(test_ids: list[str]) -> None:
    wanted = {f"family_equals_transformers[{name}-{shape}]" for name in FAMILIES for shape in SHAPES}
    missing = [name for name in sorted(wanted) if not any(test_id.endswith(name) for test_id in test_ids)]
    assert missing == []


def test_the_family_shown_as_an_example_is_the_real_one() -> None:
    blocks = re.findall(r"```python\n# (parallel/families/\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert blocks
    for file, code in blocks:
        assert code == (REPOSITORY / file).read_text()


def test_every_family_file_is_small() -> None:
    for file in (REPOSITORY / "parallel" / "families").glob("*.py"):
        if file.stem in FAMILIES:
            assert len(file.read_text().splitlines()) <= 120, file.name
