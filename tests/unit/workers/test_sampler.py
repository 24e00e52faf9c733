"""Tokens follow the distribution that the parameters ask for, and a row never depends on its batch."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.plans import make_plan
from helpers.sampling_cases import NOISE_ENDS
from weft.limits import MAX_LOGPROBS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE

from parallel.device.cpu import CpuDevice
from parallel.kernels.sampling import edit_in_torch, gumbel
from parallel.kernels.truncation import device_bounds, host_bounds, lower_bounds
from workers.errors import InvalidRequestError
from workers.logit_edits import SequenceEdits
from workers.plan import ModelOutput, NewSequence
from workers.request import GREEDY_TEMPERATURE, SamplingParams, TokenLogprobs
from workers.row_draws import RowDraws
from workers.sampler import Sampler, nothing_sampled
from workers.slot_draws import SlotDraws


def new_sequence(
    slot: int = 0, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any
) -> NewSequence:
    return NewSequence(
        slot=slot,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**{"max_tokens": 100, **params}),
        stop_token_ids=list(params.get("stop_token_ids", ())),
    )


class Token(NamedTuple):
    """What a row has sampled."""

    token_id: int
    error: str | None
    logprobs: TokenLogprobs | None


def rows_of(output: ModelOutput) -> list[Token]:
    return [
        Token(token_id, output.errors.get(slot), output.logprobs.get(slot))
        for slot, token_id in zip(output.slots, output.token_ids, strict=True)
    ]


def sample_all(logits: torch.Tensor, news: list[NewSequence], positions: list[int]) -> list[Token]:
    slots = SlotDraws(max(new.slot for new in news) + 1)
    for new in news:
        slots.add(new)
    rows = np.array([new.slot for new in news]), np.array(positions)
    sampler = Sampler(device=CpuDevice(), draws=slots)
    return rows_of(sampler.sample(logits.clone(), *rows, slots.edits(*rows)).result(0))


def sample_one(logits: list[float] | torch.Tensor, position: int = 1, **params: Any) -> Token:
    (token,) = sample_all(torch.as_tensor(logits)[None], [new_sequence(**params)], [position])
    return token


def draws(logits: torch.Tensor, num: int, **params: Any) -> torch.Tensor:
    """Token counts over `num` positions of one seed."""
    news = [new_sequence(slot, **params) for slot in range(num)]
    tokens = sample_all(logits.expand(num, -1), news, [*range(num)])
    return torch.bincount(torch.tensor([token.token_id for token in tokens]), minlength=len(logits))


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    rows = RowDraws(np.zeros(len(seeds), np.int64), np.zeros((4, len(seeds))), seeds.astype(np.uint64))
    return torch.from_numpy(np.ascontiguousarray(rows.draws(positions).noise["key"]).view(np.int32))


def noise_of(seeds: np.ndarray, positions: np.ndarray, num_tokens: int) -> np.ndarray:
    """[S, V], as numbers in [0, 1]."""
    return gumbel(noise_keys(seeds, positions), num_tokens).neg().exp().neg().exp().double().numpy()


@pytest.mark.parametrize("varied", ["seed", "position", "both", "token"])
def test_noise_is_uniform_and_independent_over_seeds_positions_and_tokens(varied: str) -> None:
    num = 200_000
    ascending, fixed = np.arange(num), np.full(num, 7)
    match varied:
        case "seed":
            noise = noise_of(ascending, fixed, 3)[:, 2]
        case "position":
            noise = noise_of(fixed, ascending, 3)[:, 2]
        case "both":
            noise = noise_of(ascending, ascending[::-1], 3)[:, 2]
        case "token":
            noise = noise_of(fixed[:1], fixed[:1], num)[0]
    counts = np.bincount((noise * 1000).astype(int).clip(max=999), minlength=1000)
    chi_square = ((counts - num / 1000) ** 2 / (num / 1000)).sum()
    assert abs(chi_square - 999) < 5 * math.sqrt(2 * 999)
    places = (noise * 32).astype(int).clip(max=31)
    pairs = np.bincount(places[:-1] * 32 + places[1:], minlength=1024)
    expected = (num - 1) / 1024
    assert abs(((pairs - expected) ** 2 / expected).sum() - 1023) < 5 * math.sqrt(2 * 1023)
    for lag in (1, 2, 16, 256):
        assert abs(np.corrcoef(noise[:-lag], noise[lag:])[0, 1]) < 5 / math.sqrt(num)


def test_each_of_many_equal_tokens_is_drawn_as_often() -> None:
    num_draws, num_tokens, num_parts = 2048, 20_000, 64
    seeds, positions = np.full(64, 5), np.arange(64)
    places = [noise_of(seeds, positions + start, num_tokens).argmax(1) for start in range(0, num_draws, 64)]
    counts = np.bincount(np.concatenate(places) * num_parts // num_tokens, minlength=num_parts)
    expected = num_draws / num_parts
    assert abs(((counts - expected) ** 2 / expected).sum() - (num_parts - 1)) < 5 * math.sqrt(2 * num_parts)


def test_noise_is_part_of_the_protocol_between_replicas() -> None:
    """These values must never change: a failover would go on with other noise."""
    keys = noise_keys(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 5]))
    noise = gumbel(keys, 100_000)[:, [0, 1, 99_999]]
    seen = keys.numpy().view(np.uint32).tolist()
    assert seen == [
        [2956624461, 134076554],
        [816682766, 184976467],
        [1235972582, 3838245630],
    ]
    expected = [-1.037993, -0.656042, 0.815955, -1.459904, 4.189769, 1.163062, -1.282339, 0.435914, 3.665114]
    assert noise.flatten().tolist() == pytest.approx(expected, abs=2e-6)
    ends = torch.from_numpy(np.array(NOISE_ENDS, np.uint32).view(np.int32))
    assert gumbel(ends, 1)[:, 0].tolist() == pytest.approx([22.1807, -2.8115], abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_sampled_tokens_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    num = 20_000
    counts = draws(logits, num, seed=11, **params)
    probs = oracle(logits, **params)
    assert counts[probs == 0].sum() == 0
    expected = probs * num
    common = expected >= 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    rare = (counts[~common].sum() - expected[~common].sum()) ** 2 / max(float(expected[~common].sum()), 5.0)
    degrees = int(common.sum())
    assert chi_square + float(rare) < degrees + 4 * math.sqrt(2 * degrees) + 5


def oracle(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution as the definitions say, by sorting."""
    probs = (logits.double() / temperature).softmax(-1)
    if 0 < top_k < len(logits):
        probs = torch.where(probs >= probs.sort(descending=True).values[top_k - 1], probs, 0.0)
        probs /= probs.sum()
    if top_p < 1:
        values, order = probs.sort(descending=True)
        dropped = order[values.cumsum(-1) - values >= top_p]
        probs[dropped] = 0.0
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


def test_truncation_equals_the_oracle_and_host_equals_device() -> None:
    generator = torch.Generator().manual_seed(3)
    for case in range(200):
        logits = torch.randn(97, generator=generator) * (1 + case % 5)
        top_k = [0, 1, 7, 96, 97, 200][case % 6]
        top_p = [1.0, 0.05, 0.5, 0.99][case % 4]
        min_p = [0.0, 0.0, 0.1][case % 3]
        scaled = (logits - logits.max())[None]
        kept = scaled >= lower_bounds(
            scaled, np.array([0]), np.array([float(top_k)]), np.array([top_p]), np.array([min_p])
        )
        assert torch.equal(kept[0], oracle(logits, top_k=top_k, top_p=top_p, min_p=min_p) > 0)
        arguments = scaled, np.array([float(top_k or 97)]).clip(max=97), np.array([top_p])
        if top_p < 1:
            assert torch.equal(host_bounds(*arguments), device_bounds(*arguments))


def test_ties_with_the_last_token_stay() -> None:
    assert (draws(torch.tensor([1.0, 1.0, 1.0, 0.0]), 300, top_k=2) > 0).tolist() == [True, True, True, False]


def test_greedy_takes_the_first_largest() -> None:
    assert sample_one([0.0, 3.0, 3.0], temperature=0.0).token_id == 1
    assert sample_one([0.0, 3.0, 2.9], temperature=1e-9).token_id == 1


def test_greedy_rows_take_the_first_largest_beside_one_that_draws() -> None:
    news = [new_sequence(slot, temperature=1e-9, seed=slot) for slot in range(19)]
    tokens = sample_all(torch.zeros(20, 8), [*news, new_sequence(19, temperature=1.0)], [1] * 20)
    assert {token.token_id for token in tokens[:19]} == {0}


def test_the_least_temperature_that_is_not_greedy_draws() -> None:
    tokens = {sample_one([3.0, 3.0], temperature=GREEDY_TEMPERATURE, seed=seed).token_id for seed in range(20)}
    assert tokens == {0, 1}


def test_extreme_logits_and_temperatures_stay_in_range() -> None:
    assert sample_one([-3e38, 3e38, 0.0], temperature=2.0).token_id == 1
    assert sample_one([1.0, 2.0, 3.0], temperature=2e-5).token_id == 2
    assert sample_one([-torch.inf, 0.0, -torch.inf], temperature=100.0).token_id == 1


def test_nan_fails_its_own_row_only() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [0.0, math.inf], [2.0, 1.0]])
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"temperature": 0.01, "top_p": 0.9},
        {"temperature": 0.01, "top_k": 1},
        {"temperature": 0.0, "logprobs": 1},
    ]
    for params in kinds:
        tokens = sample_all(logits, [new_sequence(slot, **params) for slot in range(4)], [1] * 4)
        assert [token.token_id for token in tokens] == [1, -1, -1, 0]
        assert [token.error is not None for token in tokens] == [False, True, True, False]
        has_logprobs = "logprobs" in params
        assert [token.logprobs is not None for token in tokens] == [has_logprobs, False, False, has_logprobs]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 1e39}, "temperature is 1e\\+39; allowed: 0 to 1e\\+36"),
        ({"temperature": math.inf}, "temperature is inf; allowed: 0 to 1e\\+36"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids contain -1; allowed: at least 0"),
        ({"stop_token_ids": (3,) * 1025}, "stop_token_ids has 1025 entries; allowed: at most 1024"),
        ({"stop": ("a",) * 17}, "stop has 17 entries; allowed: at most 16"),
        ({"stop": ("a", "")}, "length of a stop string is 0; allowed: 1 to 1024"),
        ({"stop": ("a" * 1025,)}, "length of a stop string is 1025; allowed: 1 to 1024"),
    ],
)
def test_values_that_would_reach_the_rows_of_others_or_cost_too_much_are_refused(
    params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("temperature", (0.0, MAX_TEMPERATURE), (-0.1, math.nan)),
        ("top_p", (1e-9, 1.0), (0.0, 1.1, math.nan)),
        ("top_k", (0, 2**31), (-1, 2**31 + 1)),
        ("min_p", (0.0, 1.0), (-0.1, 1.1, math.nan)),
        ("seed", (0, 2**64 - 1), (-1, 2**64)),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1, math.nan)),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1, math.nan)),
        ("max_tokens", (1, 2**31), (0, 2**31 + 1)),
        ("min_tokens", (0, 16), (-1, 17)),  # max_tokens is 16
        ("logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
        ("stop_token_ids", ((0,) * MAX_STOP_TOKEN_IDS,), ()),
        ("stop", (("a",) * MAX_STOP_STRINGS, ("a" * MAX_STOP_STRING_CHARS,)), ()),
    ],
)
def test_each_parameter_may_be_at_either_end_of_its_range_and_not_beyond(
    name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(InvalidRequestError, match=f"{name} is {value}; allowed: "):
            SamplingParams(**{name: value})


def test_the_highest_temperature_makes_all_tokens_alike() -> None:
    tokens = {sample_one([0.0, 9.0, -torch.inf], temperature=MAX_TEMPERATURE, seed=seed).token_id for seed in range(40)}
    assert tokens == {0, 1}


def test_a_row_never_depends_on_its_batch() -> None:
    """Rows of every kind together, in two orders, equal the same rows alone."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 2000, "top_p": 0.99, "logprobs": 3},
        {"temperature": 0.0, "presence_penalty": 2.0, "logprobs": 0},
    ]
    generator = torch.Generator().manual_seed(5)
    news = [new_sequence(slot, (1, 2, 3), (4, 4, slot), seed=slot, **kinds[slot % len(kinds)]) for slot in range(40)]
    logits = torch.randn(40, 5000, generator=generator) * 3
    positions = [6] * 40
    together = sample_all(logits, news, positions)
    order = list(reversed(range(40)))
    backwards = sample_all(logits[order], [news[i] for i in order], positions)
    assert [backwards[i] for i in order] == together
    for i in range(40):
        (alone,) = sample_all(logits[i : i + 1], [news[i]], [6])
        assert alone == together[i]


@pytest.mark.parametrize("params", [{"temperature": 1.0, "top_p": 0.8}, {"presence_penalty": 0.01}, {"logprobs": 2}])
def test_logits_in_the_dtype_of_the_model_give_what_they_give_in_float32(params: dict[str, Any]) -> None:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(6)).bfloat16()
    news = [
        new_sequence(slot, output=tuple(range(500)), seed=slot, **{"temperature": 0.0, **params}) for slot in range(30)
    ]
    assert sample_all(logits, news, [501] * 30) == sample_all(logits.float(), news, [501] * 30)


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 0.0])
    new = new_sequence(
        prompt=(0, 1),
        output=(2, 2),
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    slots = SlotDraws(1)
    slots.add(new)
    slots.add_output(0, [3])
    assert edited(logits, slots, 5).tolist() == [1.0, -4.0, 0.5 - 0.25 - 1.0, 0.25 - 0.25 - 0.5, 0.0]


def edited(logits: torch.Tensor, slots: SlotDraws, position: int) -> torch.Tensor:
    """Those of slot 0."""
    edits = slots.edits(np.array([0]), np.array([position]))
    assert edits is not None
    logits = logits.clone()
    edit_in_torch(logits[None], edits, 0)
    return logits


def test_the_least_repetition_penalty_keeps_logits_finite() -> None:
    token = sample_one([1.0, 2.0, 3.0, -1.0], temperature=0.0, repetition_penalty=1e-45)  # the prompt is token 1
    assert (token.token_id, token.error) == (1, None)


def test_the_largest_repetition_penalty_leaves_a_choice_among_tokens_that_were_all_seen() -> None:
    token = sample_one([-3.0, -2.0, -4.0], prompt=(0, 1, 2), temperature=0.0, repetition_penalty=3.4e38)
    assert (token.token_id, token.error) == (1, None)


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.inf, math.nan])
def test_a_repetition_penalty_that_is_no_positive_number_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: a finite number, more than 0"):
        SamplingParams(repetition_penalty=penalty)


def test_penalties_of_a_resumed_sequence_equal_those_kept_step_by_step() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    output = tuple(int(t) for t in torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(2)))
    params: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 1.0}
    stepwise, resumed = SlotDraws(1), SlotDraws(1)
    stepwise.add(new_sequence(output=(), **params))
    for token_id in output:
        stepwise.add_output(0, [token_id])
    resumed.add(new_sequence(output=output, **params))
    assert torch.equal(edited(logits, stepwise, 301), edited(logits, resumed, 301))


@pytest.mark.parametrize("last", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("is_early", [False, True], ids=["on the device", "early"])
def test_a_last_token_that_no_plan_has_told_counts_as_one_that_was_told(last: int, is_early: bool) -> None:
    """It is in the prompt, the output, both or neither; beside a sequence that was told all."""
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(3))
    params: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.7}
    rows, positions = np.array([0, 1]), np.array([6, 8])

    def edit(*, told: list[int], early: list[int], last_S: torch.Tensor | None = None) -> torch.Tensor:
        slots = SlotDraws(2)
        slots.add(new_sequence(0, prompt=(5, 6), output=(7, 7, 7, 8), **params))
        slots.add(new_sequence(1, (1, 2), (2, 2, 3, 3, 3), min_tokens=9, stop_token_ids=(4, 7), **params))
        if early:
            slots.add_early(rows, positions, [0, *early])
        slots.add_output(1, told)
        edits = slots.edits(rows, positions, last_S)
        assert edits is not None
        edited = logits.clone()
        edit_in_torch(edited[:, :4], edits, 0)  # in parts, as tensor ranks do
        edit_in_torch(edited[:, 4:], edits, 4)
        return edited

    expected = edit(told=[last], early=[])
    assert not torch.equal(expected[1], edit(told=[0], early=[])[1])
    if is_early:
        assert torch.equal(edit(told=[], early=[last]), expected)
        assert torch.equal(edit(told=[last], early=[last]), expected), "counted once"
    else:
        assert torch.equal(edit(told=[], early=[], last_S=torch.tensor([9, last])), expected)


def test_min_tokens_forbids_stop_ids_until_it_is_reached() -> None:
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1, 99)}
    assert sample_one([0.0, 9.0, 1.0], position=1, **params).token_id == 2
    assert sample_one([0.0, 9.0, 1.0], position=2, **params).token_id == 2
    assert sample_one([0.0, 9.0, 1.0], position=3, **params).token_id == 1


@pytest.mark.parametrize("params", [{"stop_token_ids": (3,)}, {"min_tokens": 2}])
def test_stop_ids_are_edits_only_where_tokens_must_come_before_them(params: dict[str, Any]) -> None:
    slots = SlotDraws(1)
    slots.add(new_sequence(**params))
    assert not slots.has_edits


def test_a_step_in_which_nobody_samples_gives_no_tokens() -> None:
    nothing = nothing_sampled()
    assert nothing.result(3) == ModelOutput(3, [], [])


def test_a_small_vocabulary_has_no_more_alternatives_than_tokens() -> None:
    token = sample_one([0.5, 2.0, 1.0], temperature=0.0, logprobs=20)

    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 2, 0]


def test_logprobs_without_alternatives_are_those_of_the_token_alone() -> None:
    token = sample_one([math.log(3), 0.0], temperature=0.0, logprobs=0)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(math.log(0.75))
    assert token.logprobs.top == ()


def test_logprobs_are_of_the_model_and_not_of_what_is_sampled_from() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    expected = logits.log_softmax(-1).tolist()
    token = sample_one(logits, temperature=0.0, min_tokens=1, stop_token_ids=(2,), logprobs=2)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected[1], abs=1e-6)
    assert [token_id for token_id, _ in token.logprobs.top] == [2, 1]
    assert [value for _, value in token.logprobs.top] == pytest.approx([expected[2], expected[1]], abs=1e-6)


def test_a_slot_taken_again_forgets_its_last_sequence() -> None:
    slots, rows = SlotDraws(1), (np.array([0]), np.array([1]))
    slots.add(new_sequence(temperature=2.0, top_p=0.5, logprobs=1, repetition_penalty=2.0))
    assert slots.edits(*rows) is not None
    assert slots.edits(rows[0][:0], rows[1][:0]) is None, "nobody samples"
    assert slots.has_edits
    slots.apply(make_plan(1, [0], [], []))
    assert not slots.has_edits
    slots.apply(make_plan(2, [], [new_sequence(temperature=0.0)], []))
    assert slots.edits(*rows) is None
    sampler = Sampler(device=CpuDevice(), draws=slots)
    assert sampler.sample(torch.tensor([[5.0, 6.0]]), *rows, None).result(3) == ModelOutput(3, [0], [1])


def test_the_largest_logits_alone_are_asked_for_where_top_k_limits_all_that_is_limited() -> None:
    slots = SlotDraws(8)
    for slot, params in enumerate(
        ({"temperature": 0.0, "top_k": 5}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7})
    ):
        slots.add(new_sequence(slot, **params))
    three, four = np.arange(3), np.arange(4)
    assert slots.rows(three[:2]).sift(three[:2], None) is None, "none is limited"
    for more, number in (
        ({"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1}, 9),
        ({"temperature": 0.5, "top_k": 2**31}, 2**31 - 1),
        ({"temperature": 0.5, "min_p": 0.1}, None),
        ({"temperature": 0.5, "top_p": 0.9}, None),
        ({"temperature": 0.5, "top_k": 9, "logprobs": 0}, None),
        ({"temperature": 0.5, "top_k": 9, "presence_penalty": 0.1}, 9),
    ):
        slots.add(new_sequence(3, **more))
        sift = slots.rows(four).sift(four, None)
        assert (None if sift is None else sift.numbers.tolist()) == (None if number is None else [1, 1, 7, number]), (
            more
        )
    sift = slots.rows(three).sift(three, None)
    assert sift is not None
    assert sift.noise["temperature"].tolist() == [0, 0.5, 0]
    draws = slots.rows(three).draws(three)
    assert draws.noise["temperature"].tolist() == [0, 0.5, 2], "as without the sift"
    assert (sift.noise["key"] == draws.noise["key"]).all()
    kept = draws.noise["key"].tolist()
    assert slots.rows(three).draws(four[1:]).noise["key"].tolist() != kept
    assert draws.noise["key"].tolist() == kept, "a step that is still queued"


def test_logits_are_not_asked_for_where_no_slot_wants_more_than_the_largest_with_noise() -> None:
    slots = SlotDraws(8)
    one, two = np.array([0]), np.array([0, 1])
    for slot, params in enumerate(({"temperature": 0.0, "top_k": 5}, {"temperature": 0.5})):
        slots.add(new_sequence(slot, **params))
    for search, temperatures in (
        (slots.rows(one).search(one, None), None),
        (slots.rows(two).search(two, None), [0.0, 0.5]),
    ):
        assert search is not None
        assert (None if search.noise is None else search.noise["temperature"].tolist()) == temperatures
    assert search.noise is not None
    assert (search.noise["key"] == slots.rows(two).draws(two).noise["key"]).all()
    for more in (
        {"logprobs": 0},
        {"temperature": 0.5, "top_k": 9},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0.5, "min_p": 0.1},
    ):
        slots.add(new_sequence(2, **{"temperature": 0.0, **more}))
        assert slots.rows(np.arange(3)).search(np.arange(3), None) is None, more
        assert slots.rows(two).search(two, None) is not None


@pytest.mark.parametrize(
    ("params", "position", "expected"),
    [
        ({}, 5, None),
        ({"repetition_penalty": 1.5}, 5, ([6, 7, 8, 9], 1.5, [0] * 4)),
        ({"presence_penalty": 0.5, "frequency_penalty": -1}, 5, ([8, 9], 1, [-1.5, -0.5])),
        ({"min_tokens": 3, "stop_token_ids": (3, 4)}, 4, ([3, 4], 1, [math.inf] * 2)),
        ({"min_tokens": 3, "stop_token_ids": (3, 4)}, 5, None),
        (
            {"min_tokens": 4, "stop_token_ids": (4, 8), "presence_penalty": 0.5},
            5,
            ([9, 4, 8], 1, [0.5, *[math.inf] * 2]),
        ),
        ({"min_tokens": 4, "stop_token_ids": (8,), "repetition_penalty": 2}, 5, ([6, 7, 9, 8], 2, [0, 0, 0, math.inf])),
    ],
)
def test_penalties_and_forbidden_stop_ids_are_edits_of_logits(
    params: dict[str, Any], position: int, expected: tuple[list[int], float, list[float]] | None
) -> None:
    slots, rows = SlotDraws(2), np.array([0, 1])
    slots.add(new_sequence(0, temperature=0.0))
    slots.add(new_sequence(1, prompt=(6, 7), output=(8, 9), **{"temperature": 0.0, **params}))
    slots.add_output(1, [8])
    edits = slots.edits(rows, np.array([5, position]))
    if expected is None:
        assert edits is None
        return
    assert edits is not None
    ids, factor, offsets = expected
    assert edits.starts.tolist() == [0, 0, len(ids)]
    assert edits.token_ids.tolist() == ids
    assert edits.factors.tolist() == [1, factor]
    assert edits.offsets.tolist() == offsets


def _edits_of(prompt: list[int], **params: Any) -> Any:

    return SequenceEdits(NewSequence(0, prompt, len(prompt), SamplingParams(**params), []))


def test_penalties_reach_all_of_many_tokens() -> None:
    edits = _edits_of(list(range(100, 300)), repetition_penalty=1.5)
    assert edits.at(200).ids.tolist() == list(range(100, 300))


def test_a_token_that_was_counted_early_counts_once() -> None:
    edits = _edits_of([1, 2], frequency_penalty=1.0)
    edits.add_early(7)
    edits.add_output([7])
    assert edits.lacks_last(4), "the one after it is not known"
    assert edits.at(3).offsets.tolist() == [1.0]
    edits.add_output([7])
    assert not edits.lacks_last(4)
    assert edits.at(4).offsets.tolist() == [2.0], "the next one is another"
