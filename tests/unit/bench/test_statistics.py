"""From records to numbers: percentiles as numpy has them, rates, goodput, errors."""

import random

import numpy as np
import pytest

from bench.errors import BenchConfigError
from bench.load.records import CallError, CallRecord, ErrorKind, Usage
from bench.load.statistics import Distribution, Targets, describe_errors, percentile, summarize


def answered(
    sent_s: float, times_s: list[float], *, num_in: int = 10, due_s: float | None = None, num_asked: int | None = None
) -> CallRecord:
    """A request whose tokens came one by one at these times."""
    record = CallRecord(num_asked=num_asked or len(times_s), due_s=due_s, sent_s=sent_s)
    for time_s in times_s:
        record.note(1, time_s)
    usage = Usage(prompt_tokens=num_in, cached_tokens=num_in // 2, completion_tokens=len(times_s))
    record.finish(usage, max(times_s, default=sent_s))
    return record


def failed(
    sent_s: float, kind: ErrorKind, *, due_s: float | None = None, at_s: float | None = None, message: str = "no"
) -> CallRecord:
    record = CallRecord(num_asked=5, due_s=due_s, sent_s=sent_s)
    record.fail(CallError(kind, message), sent_s if at_s is None else at_s)
    return record


@pytest.mark.parametrize("number", [1, 2, 3, 10, 997])
def test_percentiles_are_those_of_numpy(number: int) -> None:
    rng = random.Random(number)
    values = [rng.expovariate(1) for _ in range(number)]
    for share in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0):
        assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share * 100))
    distribution = Distribution.of(values)
    assert distribution is not None
    assert distribution.count == number
    assert distribution.mean == pytest.approx(np.mean(values))
    seen = (distribution.p50, distribution.p90, distribution.p95, distribution.p99, distribution.max)
    assert seen == pytest.approx(tuple(np.percentile(values, (50, 90, 95, 99, 100))))


def test_ttft_and_tpot_add_up_to_the_whole_time() -> None:
    record = answered(1.0, [1.5, 1.75, 2.5])
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (0.5, 0.5, 1.5)
    assert record.gaps_s == [0.25, 0.75]
    assert record.ttft_s + record.tpot_s * (record.num_out - 1) == record.e2e_s


def test_tokens_that_come_together_have_no_gap() -> None:
    record = CallRecord(num_asked=5, due_s=None, sent_s=0.0)
    for num_tokens, now_s in ((2, 1.0), (3, 2.0)):
        record.note(num_tokens, now_s)
    assert record.gaps_s == [0.0, 1.0, 0.0, 0.0]
    assert record.num_seen == 5


def test_time_without_text_counts_for_the_end_only() -> None:
    record = answered(0.0, [1.0, 2.0])
    record.note(0, 3.0)
    assert (record.gaps_s, record.e2e_s, record.num_seen) == ([1.0], 3.0, 2)
    late = CallRecord(num_asked=3, due_s=None, sent_s=0.0)
    for num_tokens, now_s in ((0, 1.0), (1, 2.0), (1, 4.0)):
        late.note(num_tokens, now_s)
    assert (late.ttft_s, late.gaps_s) == (1.0, [2.0])


def test_one_token_has_no_tpot() -> None:
    assert answered(0.0, [1.0]).tpot_s is None
    assert Distribution.of([None, None]) is None


def test_rates_are_over_the_whole_run() -> None:
    records = [answered(10.0, [11.0, 12.0]), answered(12.0, [13.0, 14.0, 15.0]), failed(10.5, ErrorKind.OVERLOADED)]
    summary = summarize(records)
    assert (summary.num_requests, summary.num_answered, summary.duration_s) == (3, 2, 5.0)
    assert (summary.input_tokens, summary.cached_tokens, summary.output_tokens) == (20, 10, 5)
    assert (summary.request_rate, summary.input_rate, summary.output_rate) == (0.4, 4.0, 1.0)
    assert summary.errors == {"overloaded": 1}
    assert summary.itl_s is not None
    assert summary.itl_s.mean == 1.0
    assert summary.lag_s is None
    assert summary.goodput is None


def test_rates_of_a_run_shorter_than_a_second_are_over_it() -> None:
    assert summarize([answered(10.0, [10.25, 10.5])]).output_rate == 4.0


def test_each_distribution_is_of_its_own_times() -> None:
    summary = summarize([answered(1.0, [1.5, 2.5, 5.5], due_s=0.75)])
    distributions = (summary.ttft_s, summary.tpot_s, summary.itl_s, summary.e2e_s, summary.lag_s)
    assert [each and (each.mean, each.max) for each in distributions] == [
        (0.5, 0.5), (2.0, 2.0), (2.0, 3.0), (4.5, 4.5), (0.25, 0.25)
    ]  # fmt: skip


def test_lag_counts_every_request_that_was_due() -> None:
    records = [answered(1.0, [2.0], due_s=0.75), failed(3.0, ErrorKind.TIMEOUT, due_s=2.0), answered(4.0, [5.0])]
    lag = summarize(records).lag_s
    assert lag is not None
    assert (lag.mean, lag.max) == (0.625, 1.0)


def test_time_that_failed_requests_took_counts_too() -> None:
    """A service that lets one request hang for five minutes is not as fast as without it."""
    records = [answered(0.0, [1.0, 2.0]), failed(0.0, ErrorKind.TIMEOUT, at_s=300.0)]
    summary = summarize(records)
    assert (summary.duration_s, summary.request_rate) == (300.0, 1 / 300)


def test_errors_are_told_with_the_first_message_of_each_kind() -> None:
    summary = summarize(
        [
            failed(0.0, ErrorKind.TIMEOUT, message="late"),
            failed(1.0, ErrorKind.BAD_REQUEST, message="too long by 1"),
            failed(2.0, ErrorKind.BAD_REQUEST, message="too long by 2"),
        ]
    )
    assert describe_errors(summary) == "2 bad request (too long by 1); 1 timeout (late)"
    later = summarize([failed(0.0, ErrorKind.TIMEOUT, message="later")])
    assert describe_errors(summary, later) == "2 bad request (too long by 1); 2 timeout (late)"


def test_goodput_counts_requests_that_keep_both_targets() -> None:
    fast, slow_start, slow_tokens, single = (
        answered(0.0, [0.5, 0.75]),
        answered(0.0, [1.5, 1.75]),
        answered(0.0, [0.5, 2.0]),
        answered(0.0, [0.25]),
    )
    records = [fast, slow_start, slow_tokens, single, failed(0.0, ErrorKind.SERVER)]
    good = summarize(records, Targets(ttft_s=1.0, tpot_s=0.5)).goodput
    assert good is not None
    assert (good.num_requests, good.request_rate, good.output_rate) == (2, 1.0, 1.5)
    only_ttft = summarize(records, Targets(ttft_s=1.0)).goodput
    assert only_ttft is not None
    assert only_ttft.num_requests == 3
    only_e2e = summarize(records, Targets(e2e_s=1.75)).goodput
    assert only_e2e is not None
    assert only_e2e.num_requests == 3, "all that were answered but the slowest"


def test_short_answers_are_counted() -> None:
    whole = [answered(0.0, [1.0]), answered(0.0, [1.0])]
    summary = summarize([answered(0.0, [1.0], num_asked=4), *whole, failed(0.0, ErrorKind.SERVER)])
    assert (summary.num_short, summary.output_tokens, summary.asked_tokens) == (1, 3, 6)


def test_run_in_which_all_fail_has_numbers_too() -> None:
    summary = summarize([failed(1.0, ErrorKind.UNAVAILABLE), failed(1.0, ErrorKind.UNAVAILABLE)], Targets(ttft_s=1.0))
    assert (summary.num_answered, summary.num_seen, summary.output_rate, summary.ttft_s) == (0, 0, 0.0, None)
    assert summary.errors == {"unavailable": 2}


def test_targets_must_be_positive() -> None:
    with pytest.raises(BenchConfigError, match=r"--ttft-target is 0 ms; allowed: a number more than 0"):
        Targets(ttft_s=0.0)
    with pytest.raises(BenchConfigError, match=r"--e2e-target is nan ms"):
        Targets(e2e_s=float("nan"))


def test_an_answer_ends_with_its_last_token_and_not_with_its_stream() -> None:
    record = answered(0.0, [1.0, 2.0])
    record.ended_s = 3.0
    goodput = summarize([record], Targets(e2e_s=2.5)).goodput
    assert goodput is not None
    assert goodput.num_requests == 1


def test_an_empty_answer_keeps_no_target() -> None:
    """Else a service that answers nothing, and that at once, would have the best goodput."""
    goodput = summarize([answered(0.0, []), answered(0.0, [0.5])], Targets(ttft_s=1.0, tpot_s=1.0, e2e_s=1.0)).goodput
    assert goodput is not None
    assert goodput.num_requests == 1


def test_an_answer_whose_tokens_were_not_seen_lasts_until_its_end() -> None:
    silent, usage = CallRecord(num_asked=1, due_s=None, sent_s=1.0), answered(1.0, [1.5]).usage
    assert usage is not None
    silent.finish(usage, 3.0)
    for targets, num_good in ((Targets(ttft_s=1.9), 0), (Targets(e2e_s=1.9), 0), (Targets(ttft_s=2.0, tpot_s=1.0), 1)):
        summary = summarize([silent], targets)
        assert (summary.duration_s, summary.request_rate) == (2.0, 0.5)
        assert summary.goodput is not None
        assert summary.goodput.num_requests == num_good


def test_time_per_token_counts_tokens_and_not_pieces_of_text() -> None:
    record = answered(1.0, [1.5, 3.5])
    record.usage = Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=5)
    assert (record.num_seen, record.tpot_s) == (2, 0.5)
