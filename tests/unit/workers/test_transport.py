"""Plans arrive in order or not at all; each end notices when the other is gone."""

import contextlib
import multiprocessing
import os
import queue
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import pytest
from helpers.plans import make_plan
from weft.addresses import split_host_port

from parallel.errors import CollectiveError
from workers.errors import GroupFailedError
from workers.local_plans import MAX_BYTES, PlanReceiver, PlanSender
from workers.plan import ModelOutput, NewSequence, ScheduledSequence, StepPlan
from workers.request import SamplingParams, TokenLogprobs
from workers.transport import LeaderLink, PlanChain, PlanMessage, RankLink

HOST = "127.0.0.1"


def plan(number: int, num_seqs: int = 2) -> StepPlan:
    new = NewSequence(1, [5, 6, 7], 2, SamplingParams(seed=2**64 - 1, stop=("a",), temperature=0.1), [2])
    return make_plan(number, [3], [new], [ScheduledSequence(i, 9, 1, [4], [8], True) for i in range(num_seqs)])


def in_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def echo_rank(endpoint: str, rank: int) -> None:
    """Answer each plan with a token that depends on it."""
    with RankLink(endpoint, rank) as link:
        assert link.report(10 * rank, 120.0) == 7
        while (received := link.receive_plan()) is not None:
            if received.number == 99:
                raise ValueError("a bad plan")
            logprobs = {1: TokenLogprobs(token_id=3, logprob=-0.5, top=((3, -0.5),))}
            link.send_output(ModelOutput(received.number, [1], [received.number], logprobs))


def start(num_ranks: int) -> tuple[LeaderLink, list[threading.Thread]]:
    leader = LeaderLink(HOST, range(1, num_ranks + 1))

    def run(rank: int) -> None:
        with contextlib.suppress(ValueError, GroupFailedError):  # what the leader sees of it is under test
            echo_rank(leader.endpoints[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in leader.endpoints]
    for thread in threads:
        thread.start()
    assert leader.gather(120.0) == {rank: 10 * rank for rank in leader.endpoints}
    leader.proceed(7)
    return leader, threads


def test_plans_and_outputs_cross_unchanged() -> None:
    leader, threads = start(2)
    for number in range(1, 50):
        leader.send_plan(plan(number))
        for rank in (1, 2):
            output = leader.receive_output(rank, 5.0)
            assert (output.number, output.slots, output.token_ids) == (number, [1], [number])
            assert output.logprobs == {1: TokenLogprobs(token_id=3, logprob=-0.5, top=((3, -0.5),))}
    leader.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_seqs", [2, 9000])  # past zmq, and by it
def test_a_rank_knows_without_waiting_whether_a_plan_is_there(num_seqs: int) -> None:
    leader = LeaderLink(HOST, [1])
    there, seen = threading.Event(), queue.Queue[bool]()

    def follow() -> None:
        with RankLink(leader.endpoints[1], 1) as link:
            link.report(0, 120.0)
            seen.put(link.has_message())
            there.wait(120)
            while not link.has_message():  # the last part of its way is another thread's
                pass
            seen.put(link.receive_plan() == plan(1, num_seqs))
            seen.put(link.has_message())

    thread = in_thread(follow)
    leader.gather(120.0)
    leader.proceed(0)
    assert not seen.get(timeout=120)
    leader.send_plan(plan(1, num_seqs))
    there.set()
    assert seen.get(timeout=120)
    assert not seen.get(timeout=120)
    thread.join(10)
    leader.close()


def test_a_plan_survives_the_wire() -> None:
    sent = plan(3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepPlan) == sent


def echoes(leader: LeaderLink, plans: Iterable[StepPlan], *, rank: int = 1) -> list[int]:
    """Send plans at once, and return the numbers that a rank answers with."""
    sent = [leader.send_plan(each) for each in plans]
    return [leader.receive_output(rank, 10.0).number for _ in sent]


def test_small_plans_go_past_zmq_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = start(2)
    with monkeypatch.context() as patched:
        patched.setattr(leader, "_send", lambda rank, encoded: pytest.fail(f"rank {rank} is sent a plan by zmq"))
        assert echoes(leader, [plan(1), plan(2)]) == [1, 2]
    leader.close()


def test_large_plans_keep_their_place_among_small_ones() -> None:
    leader, _ = start(1)
    sizes = [2, 9000, 2, 2, 9000, 9000, 2]
    assert len(msgspec.msgpack.encode(plan(1, 9000))) > MAX_BYTES
    assert echoes(leader, (plan(number, size) for number, size in enumerate(sizes))) == list(range(len(sizes)))
    leader.close()


def test_a_rank_on_another_machine_gets_its_plans() -> None:
    leader = LeaderLink(HOST, [1])
    address, _, name = leader.endpoints[1].partition(" ")
    assert name
    in_thread(lambda: echo_rank(f"{address} weft-nowhere", 1))
    leader.gather(120.0)
    leader.proceed(7)
    assert echoes(leader, [plan(1), plan(2, 9000), plan(3)]) == [1, 2, 3]
    leader.close()


def send_many(leader: LeaderLink, count: int) -> None:
    for number in range(count):
        leader.send_plan(plan(number))


def test_a_rank_that_reads_no_plans_is_named() -> None:
    leader = LeaderLink(HOST, [1])
    ended = threading.Event()

    def run() -> None:
        with RankLink(leader.endpoints[1], 1) as link:
            link.report(0, 120.0)
            ended.wait(30)

    thread = in_thread(run)
    leader.gather(120.0)
    leader.proceed(7)
    with pytest.raises(GroupFailedError, match="rank 1 takes no more messages: it hangs"):
        send_many(leader, 100_000)
    ended.set()
    thread.join(10)
    leader.close()


def test_plans_wait_for_a_stage_however_large_and_many_are_in_flight() -> None:
    """The first stage of a pipeline computes when it has sent as many plans as there are stages."""
    leader = LeaderLink(HOST, [1])
    all_sent, received = threading.Event(), queue.Queue[int]()
    sizes = [5000] * 20 + [200] * 20 + [2] * 20
    assert 0.8 * MAX_BYTES < len(msgspec.msgpack.encode(plan(1, sizes[0]))) < MAX_BYTES

    def follow() -> None:
        with RankLink(leader.endpoints[1], 1) as link:
            link.report(0, 120.0)
            all_sent.wait(120)
            while (each := link.receive_plan()) is not None:
                received.put(each.number)

    thread = in_thread(follow)
    leader.gather(120.0)
    leader.proceed(0)
    for number, size in enumerate(sizes):
        leader.send_plan(plan(number, size))
    all_sent.set()
    assert [received.get(timeout=60) for _ in sizes] == list(range(len(sizes)))
    leader.close()
    thread.join(10)


def test_processes_of_other_users_are_no_ranks_and_no_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = PlanSender()
    stranger = PlanReceiver.connect(sender.name, 1)
    assert stranger is not None
    monkeypatch.setattr(os, "geteuid", lambda: -2)
    assert PlanReceiver.connect(sender.name, 1) is None
    sender.admit()
    assert not sender.send(1, b"a plan")
    assert stranger.receive() is None
    assert not stranger.has_next, "it was turned away"
    stranger.close()
    sender.close()


@contextlib.contextmanager
def connected() -> Iterator[tuple[PlanSender, PlanReceiver]]:
    """A rank that has its first message, and gives up a wait after a moment."""
    sender = PlanSender()
    receiver = PlanReceiver.connect(sender.name, 1)
    assert receiver is not None
    receiver._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    sender.admit()
    sender.send(1, b"one")
    assert receiver.receive() == b"one"
    yield sender, receiver
    receiver.close()
    sender.close()


def test_a_busy_rank_looks_for_its_next_plan_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (sender, receiver):
        monkeypatch.setattr("workers.local_plans.LOOK_S", 60.0)
        monkeypatch.setattr(os, "sched_yield", lambda: sender.send(1, b"two"))
        assert receiver.receive() == b"two"


def test_an_idle_rank_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (sender, receiver):
        assert receiver.receive() is None, "nothing came for a while"
        monkeypatch.setattr(receiver, "_look", lambda: pytest.fail("it is not busy"))
        assert receiver.receive() is None
        sender.send(1, b"two")
        assert receiver.receive() == b"two"


def test_a_rank_that_looks_sees_its_leader_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (sender, receiver):
        monkeypatch.setattr("workers.local_plans.LOOK_S", 60.0)
        monkeypatch.setattr(os, "sched_yield", sender.close)
        assert receiver.receive() is None
        assert not receiver.has_next


def test_a_rank_whose_line_broke_gets_what_comes_the_other_way_and_has_no_message_here() -> None:
    with connected() as (sender, receiver):
        sender.close()
        assert receiver.has_message(), "the end, which a wait sees at once"
        assert receiver.receive() is None
        receiver.resume()
        assert not receiver.has_next
        assert not receiver.has_message()


def test_a_gap_names_both_plans() -> None:
    sender, receiver = PlanChain(), PlanChain()
    receiver.verify(sender.seal(b"one"))
    sender.seal(b"two")
    with pytest.raises(GroupFailedError, match="plan 3 came; expected: plan 2"):
        receiver.verify(sender.seal(b"three"))


def test_another_history_names_both_digests() -> None:
    sender, receiver = PlanChain(), PlanChain()
    receiver.verify(PlanMessage(1, sender.seal(b"one").digest, b"one"))
    good = sender.seal(b"two")
    with pytest.raises(GroupFailedError, match=f"digest {good.digest:x}; expected: [0-9a-f]+"):
        receiver.verify(PlanMessage(2, good.digest, b"TWO"))


def test_a_rank_that_diverges_tells_the_leader() -> None:
    leader = LeaderLink(HOST, [1])
    failed = threading.Event()

    def run() -> None:
        with pytest.raises(GroupFailedError, match="rank 1 diverged: plan 2 came; expected: plan 1"):
            echo_rank(leader.endpoints[1], 1)
        failed.set()

    in_thread(run)
    leader.gather(120.0)
    leader.proceed(7)
    leader._chain.seal(b"a plan that never arrives")
    leader.send_plan(plan(1))
    with pytest.raises(GroupFailedError, match=r"rank 1 failed: GroupFailedError: rank 1 diverged: plan 2 came"):
        leader.receive_output(1, 10.0)
    assert failed.wait(5)
    leader.close()


def test_a_failing_rank_reports_its_error_before_it_ends() -> None:
    leader, _ = start(9)
    leader.send_plan(plan(1))
    leader.receive_output(9, 5.0)
    assert leader._local.send(9, msgspec.msgpack.encode(leader._chain.seal(msgspec.msgpack.encode(plan(99)))))
    with pytest.raises(GroupFailedError, match="rank 9 failed: ValueError: a bad plan"):
        leader.receive_output(1, 10.0) and leader.receive_output(1, 10.0)
    leader.close("rank 9 failed")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CollectiveError("it took too long"), "rank 1 told nothing: it hangs, or waits too; rank 2 failed: Collective"),
        (ValueError("of its own"), "rank 2 failed: ValueError: of its own"),
    ],
)
def test_a_rank_that_hangs_is_named_where_others_only_waited_for_it(error: Exception, said: str) -> None:
    leader = LeaderLink(HOST, [1, 2])
    is_over = threading.Event()

    def run(rank: int) -> None:
        with contextlib.suppress(type(error)), RankLink(leader.endpoints[rank], rank) as link:
            link.report(0, 120.0)
            if rank == 1:
                is_over.wait()
            raise error

    threads = [in_thread(partial(run, rank)) for rank in (1, 2)]
    leader.gather(120.0)
    leader.proceed(0)
    with pytest.raises(GroupFailedError, match=f"^{said}"):
        check_until_it_fails(leader)
    is_over.set()
    for thread in threads:
        thread.join()
    leader.close()


def test_what_ranks_say_a_moment_after_the_first_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.transport._EVIDENCE_S", 60.0)
    leader = LeaderLink(HOST, [1, 2])
    is_first_seen = threading.Event()

    def run(rank: int) -> None:
        with contextlib.suppress(ValueError), RankLink(leader.endpoints[rank], rank) as link:
            link.report(0, 120.0)
            if rank == 2:
                is_first_seen.wait(120)
            raise ValueError(f"of {rank}")

    look = leader._look

    def look_and_tell() -> None:
        look()
        if leader._failures:
            is_first_seen.set()

    monkeypatch.setattr(leader, "_look", look_and_tell)
    threads = [in_thread(partial(run, rank)) for rank in (1, 2)]
    leader.gather(120.0)
    leader.proceed(0)
    with pytest.raises(GroupFailedError, match="rank 1 failed: ValueError: of 1; rank 2 failed: ValueError: of 2"):
        check_until_it_fails(leader)
    for thread in threads:
        thread.join()
    leader.close()


def test_a_rank_elsewhere_that_died_is_not_said_to_hang_when_a_plan_finds_nobody() -> None:
    leader = LeaderLink(HOST, [1])
    address, _, _ = leader.endpoints[1].partition(" ")

    def run() -> None:
        link = RankLink(f"{address} weft-nowhere", 1)
        link.report(0, 120.0)
        link._peer.close()  # as if the process had died

    in_thread(run)
    leader.gather(120.0)
    monitor = leader._peers[1].monitor.fileno()
    assert not leader._peers[1].is_gone()
    leader.proceed(0)
    assert select.select([monitor], [], [], 120)[0]
    with pytest.raises(GroupFailedError, match="rank 1 died, hangs or is cut off"):
        send_many(leader, 100_000)
    leader.close()


def test_a_slow_rank_is_an_error_that_names_it() -> None:
    leader, _ = start(1)
    with pytest.raises(GroupFailedError, match=r"rank 1 did not answer within 0\.2 s"):
        leader.receive_output(1, 0.2)
    leader.close()


def test_a_rank_that_answers_late_but_in_time_is_waited_for() -> None:
    leader = LeaderLink(HOST, [1])
    is_waited_for = threading.Event()
    output = ModelOutput(1, [1], [5])

    def run() -> None:
        with RankLink(leader.endpoints[1], 1) as link:
            link.report(0, 120.0)
            is_waited_for.wait(120)
            link.send_output(output)
            link.receive_plan()

    in_thread(run)
    leader.gather(120.0)
    leader.proceed(0)
    check = leader.check

    def look() -> None:
        check()
        is_waited_for.set()

    leader.check = look  # type: ignore[method-assign]
    assert leader.receive_output(1, 120.0) == output
    leader.close()


def test_a_rank_that_never_comes_is_named() -> None:
    leader = LeaderLink(HOST, [1, 2])
    with pytest.raises(GroupFailedError, match=r"ranks \[1, 2\] did not start within 0 s"):
        leader.gather(0.1)
    leader.close()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_rank_is_noticed_within_seconds(kill: signal.Signals) -> None:
    leader = LeaderLink(HOST, [1])
    process = multiprocessing.get_context("spawn").Process(target=echo_rank, args=(leader.endpoints[1], 1))
    process.start()
    assert process.pid is not None
    try:
        leader.gather(60.0)
        leader.proceed(7)
        leader.send_plan(plan(1))
        leader.receive_output(1, 10.0)
        os.kill(process.pid, kill)
        start_s = time.monotonic()
        with pytest.raises(GroupFailedError, match="rank 1 died, hangs or is cut off"):
            leader.receive_output(1, 60.0)
        assert time.monotonic() - start_s < 30
    finally:
        process.kill()
        process.join(10)
        leader.close()


def knock(leader: LeaderLink, data: bytes = b"") -> socket.socket:
    """Connect as somebody who knows nothing of ranks."""
    stranger = socket.create_connection(split_host_port(leader.endpoints[1].partition(" ")[0].removeprefix("tcp://")))
    stranger.sendall(data)
    return stranger


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" * 3], ids=["silent", "http"])
def test_a_stranger_who_comes_before_a_rank_neither_takes_its_place_nor_is_missed(data: bytes) -> None:
    leader = LeaderLink(HOST, [1])
    knock(leader).close()
    stranger = knock(leader, data)
    in_thread(lambda: echo_rank(leader.endpoints[1], 1))
    leader.gather(120.0)
    leader.proceed(7)
    stranger.close()
    assert echoes(leader, [plan(1, 9000), plan(2, 9000)]) == [1, 2], "by zmq, which has seen the stranger's end first"
    leader.check()
    leader.close()


def check_until_it_fails(leader: LeaderLink) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        leader.check()


def test_a_rank_that_dies_is_noticed_though_a_stranger_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.transport.HEARTBEAT_TIMEOUT_S", 1.0)
    leader = LeaderLink(HOST, [1])
    with knock(leader):
        dead = threading.Event()

        def run() -> None:
            link = RankLink(leader.endpoints[1], 1)
            link.report(0, 120.0)
            link._peer.close()  # as if the process had died
            dead.set()

        in_thread(run)
        leader.gather(120.0)
        leader.proceed(7)
        assert dead.wait(120)
        with pytest.raises(GroupFailedError, match="rank 1 died, hangs or is cut off"):
            check_until_it_fails(leader)
    leader.close()


def test_what_is_no_message_is_a_failure_of_the_group() -> None:
    leader = LeaderLink(HOST, [1])
    errors: queue.Queue[GroupFailedError] = queue.Queue()

    def run() -> None:
        link = RankLink(leader.endpoints[1], 1)
        link._peer.socket.send(b"\xc1")
        try:
            link.report(0, 120.0)
        except GroupFailedError as error:
            errors.put(error)

    in_thread(run)
    with pytest.raises(GroupFailedError, match="rank 1 sent what is no message: MessagePack data is malformed"):
        check_until_it_fails(leader)
    leader._peers[1].socket.send(b"\xc1")
    assert "rank 1 got what is no message: MessagePack data is malformed" in str(errors.get(timeout=120))
    leader.close()


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_rank_whose_leader_is_gone_ends(ends_at_once: bool) -> None:
    leader = LeaderLink(HOST, [5])
    errors: queue.Queue[GroupFailedError] = queue.Queue()

    def run() -> None:
        try:
            echo_rank(leader.endpoints[5], 5)
        except GroupFailedError as error:
            errors.put(error)

    in_thread(run)
    leader.gather(120.0)
    leader.proceed(7)
    assert echoes(leader, [plan(1)], rank=5) == [1], "it waits for the next one"
    for peer in leader._peers.values():
        peer.close()  # as if the process had died: no word of farewell
    if ends_at_once:
        leader._local.close()  # else as if it had stopped: its end of the socket is still there
    assert "rank 5 lost its leader" in str(errors.get(timeout=120))
    leader._context.term()
    leader._local.close()


def test_a_leader_that_is_lost_within_a_step_is_told_to_whoever_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a silent machine in a collective hears of nothing until the step's time is over."""
    monkeypatch.setattr("workers.transport._LOOK_S", 0.02)
    leader = LeaderLink(HOST, [5])
    told: queue.Queue[GroupFailedError] = queue.Queue()
    is_in_step, may_end = threading.Event(), threading.Event()

    def run() -> None:
        with RankLink(leader.endpoints[5], 5) as link:
            for _ in range(3):
                link.report(0, 120.0)
            with link.watched(told.put):
                link.receive_plan()
                is_in_step.set()
                may_end.wait(120)

    rank = in_thread(run)
    for _ in range(3):
        leader.gather(120.0)
        leader.proceed(0)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)  # it waits for a plan: nothing is wrong
    leader.send_plan(plan(1))
    assert is_in_step.wait(120)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    for peer in leader._peers.values():
        peer.close()
    assert str(told.get(timeout=120)) == "rank 5 lost its leader: it died, hangs or is cut off"
    may_end.set()
    rank.join(120)
    leader._local.close()
    leader._context.term()


def test_a_leader_whose_last_plan_was_taken_after_its_end_is_told_to_whoever_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank has read of the end then: the monitor tells of it no more."""
    monkeypatch.setattr("workers.transport._LOOK_S", 0.02)
    monkeypatch.setattr("workers.transport._NUM_LOOKS", 50)
    leader = LeaderLink(HOST, [5])
    address, _, _ = leader.endpoints[5].partition(" ")
    told: queue.Queue[GroupFailedError] = queue.Queue()
    is_busy, may_end = threading.Event(), threading.Event()

    def run() -> None:
        with RankLink(f"{address} weft-nowhere", 5) as link:
            link.report(0, 120.0)
            with link.watched(told.put):
                is_busy.set()
                assert select.select([link._peer.monitor.fileno()], [], [], 120)[0], "it is busy until the end"
                link.receive_plan()
                may_end.wait(120)

    rank = in_thread(run)
    leader.gather(120.0)
    leader.proceed(0)
    leader.send_plan(plan(1))
    assert is_busy.wait(120)  # else it reads of the end before the watch
    for peer in leader._peers.values():
        peer.close()
    assert str(told.get(timeout=30)) == "rank 5 lost its leader: it died, hangs or is cut off"
    may_end.set()
    rank.join(120)
    leader._local.close()
    leader._context.term()


def test_a_rank_whose_leader_is_gone_before_it_has_answered_ends() -> None:
    with socket.create_server((HOST, 0)) as listener:
        link = RankLink(f"tcp://{HOST}:{listener.getsockname()[1]} weft-nowhere", 5)
        listener.accept()[0].close()
        with link, pytest.raises(GroupFailedError, match="rank 5 lost its leader"):
            link.report(0, 120.0)
