import pytest
from helpers.cluster import model_spec

from cluster.config import ModelSpec
from cluster.errors import ClusterConfigError, NotServedError
from cluster.wanted import ChangeKind, Models, apply, changed_section, roll, scale, undo


def model(name: str = "m", **settings: object) -> ModelSpec:
    return model_spec("/models/m", name=name, **settings)


def wanted(*specs: ModelSpec) -> Models:
    return apply({}, specs)[0]


def test_first_apply_adds_every_model() -> None:
    models, changes = apply({}, [model("a", replicas=2), model("b")])
    assert [(change.kind, change.name) for change in changes] == [(ChangeKind.ADD, "a"), (ChangeKind.ADD, "b")]
    assert changes[0].details == ("2 x (tensor parallel 1, pipeline 1) of /models/m",)
    assert (models["a"].replicas, models["a"].current.number) == (2, 1)
    assert models["a"].hash_key != models["b"].hash_key


def test_apply_again_changes_nothing_though_the_file_has_new_hash_keys() -> None:
    models = wanted(model("a"), model("b", max_context=64))
    again, changes = apply(models, [model("a"), model("b", max_context=64)])
    assert changes == []
    assert again == models


def test_another_number_of_replicas_is_no_rollout() -> None:
    models, changes = apply(wanted(model(replicas=1)), [model(replicas=3, max_replicas=4)])
    assert [change.kind for change in changes] == [ChangeKind.SCALE]
    assert changes[0].details == ("replicas: 1 -> 3", "max_replicas: default -> 4")
    assert (models["m"].replicas, models["m"].current.number) == (3, 1)


SCALED = {"max_replicas": 4, "autoscaling": {"target_requests": 8}}


def test_number_of_a_model_that_scales_by_itself_outlives_apply() -> None:
    models = scale(wanted(model(replicas=1, **SCALED)), "m", 3)
    models, changes = apply(models, [model(replicas=1, **SCALED)])
    assert changes == []
    assert models["m"].replicas == 3
    models, changes = apply(models, [model(replicas=1, **{**SCALED, "max_replicas": 2})])
    assert changes[0].details == ("replicas: 3 -> 2", "max_replicas: 4 -> 2")
    models, _ = apply(models, [model(replicas=1, max_context=64, **SCALED)])
    assert (models["m"].replicas, models["m"].current.number) == (2, 2)


def test_scaling_is_turned_on_changed_and_off_without_a_rollout() -> None:
    models = wanted(model(replicas=2, max_replicas=4))
    models, on = apply(models, [model(replicas=1, **SCALED)])
    assert on[0].kind is ChangeKind.SCALE
    assert on[0].details[0].startswith("autoscaling: default -> target_requests 8.0, target_kv_usage 0.8, ")
    assert models["m"].replicas == 2, "the number goes on from where it is"
    models, changed = apply(models, [model(**{**SCALED, "autoscaling": {"target_requests": 8, "idle_s": 60}})])
    assert [change.details for change in changed] == [("autoscaling.idle_s: 900.0 -> 60.0",)]
    models, off = apply(models, [model(replicas=1, max_replicas=4)])
    assert [change.kind for change in (*changed, *off)] == [ChangeKind.SCALE, ChangeKind.SCALE]
    assert off[0].details[0] == "replicas: 2 -> 1"
    assert (models["m"].replicas, models["m"].current.number) == (1, 1)


def test_another_setting_is_a_new_revision_with_the_old_hash_key() -> None:
    before = wanted(model())
    models, changes = apply(before, [model(max_context=64, cache={"num_blocks": 8})])
    assert [change.kind for change in changes] == [ChangeKind.ROLLOUT]
    assert changes[0].details == ("max_context: default -> 64", "cache.num_blocks: default -> 8")
    assert (models["m"].current.number, models["m"].spec.engine.max_context) == (2, 64)
    assert models["m"].spec.engine.hash_key == before["m"].spec.engine.hash_key


def test_settings_of_the_revision_before_go_back_to_it() -> None:
    models, _ = apply(wanted(model()), [model(max_context=64)])
    models, changes = apply(models, [model(replicas=2)])
    assert [change.kind for change in changes] == [ChangeKind.ROLLOUT]
    assert (models["m"].current.number, models["m"].replicas) == (1, 2)
    models, _ = apply(models, [model(max_context=32)])
    assert models["m"].current.number == 3


def test_model_that_is_not_named_is_removed() -> None:
    models, changes = apply(wanted(model("a"), model("b")), [model("b")])
    assert [(change.kind, change.name) for change in changes] == [(ChangeKind.REMOVE, "a")]
    assert list(models) == ["b"]


def test_model_that_is_added_again_goes_on_counting_revisions() -> None:
    models, _ = apply({}, [model("a"), model("b")], next_revisions={"a": 3})
    assert [models[name].current.number for name in ("a", "b")] == [3, 1]
    assert roll(models, "a", models["a"].current.section)[0]["a"].current.number == 4


def test_scale_keeps_bounds() -> None:
    models = wanted(model(replicas=2, min_replicas=1, max_replicas=4))
    assert scale(models, "m", 4)["m"].replicas == 4
    assert scale(models, "", 1)["m"].replicas == 1
    for replicas in (0, 5):
        with pytest.raises(ClusterConfigError, match=f"m: replicas is {replicas}; allowed: 1 to 4"):
            scale(models, "m", replicas)
    with pytest.raises(NotServedError, match="model is 'x'; served: 'm'"):
        scale(models, "x", 1)


def test_rollout_of_the_same_settings_is_a_new_revision() -> None:
    models = wanted(model())
    models, change = roll(models, "m", models["m"].current.section)
    assert (models["m"].current.number, change.details) == (2, ("the same settings, weights read anew",))


def test_undo_goes_back_with_the_replicas_of_now_and_forward_again() -> None:
    models = wanted(model(replicas=2))
    section = changed_section(models["m"], {"cache": {"num_blocks": 8}})
    models = scale(roll(models, "m", section)[0], "m", 3)
    models, change = undo(models, "m")
    assert (models["m"].current.number, models["m"].replicas) == (1, 3)
    assert change.details == ("cache.num_blocks: 8 -> default",)
    models, _ = undo(models, "m")
    assert (models["m"].current.number, models["m"].spec.engine.cache.num_blocks) == (2, 8)
    assert roll(models, "m", section)[0]["m"].current.number == 3


def test_undo_without_a_revision_before_is_refused() -> None:
    with pytest.raises(ClusterConfigError, match="one revision only"):
        undo(wanted(model()), "m")


def test_changed_settings_leave_the_others_alone() -> None:
    models = wanted(model(cache={"num_blocks": 8, "block_size": 4}))
    section = changed_section(models["m"], {"cache": {"num_blocks": 16}, "path": "/models/n"})
    assert (section.cache.num_blocks, section.cache.block_size, section.path) == (16, 4, "/models/n")
    with pytest.raises(ClusterConfigError, match=r"cache\.blocks: unknown key"):
        changed_section(models["m"], {"cache": {"blocks": 1}})
    with pytest.raises(ClusterConfigError, match="name: cannot change"):
        changed_section(models["m"], {"name": "n"})


def test_settings_that_were_null_are_set_and_made_null_again() -> None:
    models = wanted(model())
    scaled = changed_section(models["m"], {"autoscaling": {"idle_s": 9}, "max_replicas": 4})
    models, _ = roll(models, "m", scaled)
    assert models["m"].current.section.autoscaling is not None
    assert changed_section(models["m"], {"autoscaling": None}).autoscaling is None
