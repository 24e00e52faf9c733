"""Files of recorded decisions: bounded, private, whole up to where a process died, and refused when not understood."""

import errno
import logging
import os
import stat
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from weft.recording import Recorder, Recording, RecordingConfig, RecordingError, RecordingVersionError


class Call(msgspec.Struct, frozen=True, array_like=True):
    number: int
    text: str = ""


def record(path: Path, calls: list[Call], *, max_bytes: int = 1 << 20) -> Recorder:
    recorder = Recorder(path, max_bytes=max_bytes, clock=lambda: 0.0)
    recorder.begin("scheduler", Call(-1, "header"))
    for call in calls:
        recorder.write(call)
    return recorder


def read(path: Path) -> tuple[list[Call], bool]:
    recording = Recording(path)
    assert recording.read_header(Call) == Call(-1, "header")
    calls = list(recording.read_frames(Call))
    recording.close()
    return calls, recording.is_torn


def test_calls_come_back_in_their_order(tmp_path: Path) -> None:
    calls = [Call(i, "x" * i) for i in range(300)]
    record(tmp_path / "file", calls).close()
    assert read(tmp_path / "file") == (calls, False)
    assert Recording(tmp_path / "file").kind == "scheduler"


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    recorder = RecordingConfig(folder=str(tmp_path / "new")).open("tiny-0.1")
    assert recorder is not None
    recorder.close()
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700
    assert recorder.path.name.startswith("tiny-0.1-")


def test_nothing_is_opened_unless_asked_for() -> None:
    assert RecordingConfig().open("tiny-0.1") is None


def test_name_of_a_model_with_an_owner_is_one_file(tmp_path: Path) -> None:
    recorder = RecordingConfig(folder=str(tmp_path)).open("owner/tiny-0.1")
    assert recorder is not None
    recorder.close()
    assert recorder.path.parent == tmp_path


def test_processes_of_one_name_number_and_second_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20261122-115202")
    recorders = [RecordingConfig(folder=str(tmp_path)).open("router-0") for _ in range(2)]
    for recorder in recorders:
        assert recorder is not None
        recorder.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_frames_of_a_process_that_dies_are_there_up_to_the_last_second(tmp_path: Path) -> None:
    now_s = 0.0
    recorder = Recorder(tmp_path / "file", max_bytes=1 << 20, clock=lambda: now_s)
    recorder.begin("scheduler", Call(-1, "header"))
    recorder.write(Call(0))
    assert read(tmp_path / "file") == ([], False), "it waits for others"
    now_s = 1.0
    recorder.write(Call(1))
    assert read(tmp_path / "file") == ([Call(0), Call(1)], False)


@pytest.mark.parametrize("num_lost", range(1, 12))
def test_torn_last_frame_is_left_out(tmp_path: Path, num_lost: int) -> None:
    record(tmp_path / "file", [Call(0, "first"), Call(1, "last")]).close()
    data = (tmp_path / "file").read_bytes()
    frame = 4 + len(msgspec.msgpack.encode(Call(1, "last")))
    assert frame == 11
    (tmp_path / "file").write_bytes(data[:-num_lost])
    assert read(tmp_path / "file") == ([Call(0, "first")], num_lost < frame)


def test_file_ends_whole_at_its_limit_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = [Call(i, "x" * 1000) for i in range(1000)]
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "file", calls, max_bytes=200_000).close()
    size = (tmp_path / "file").stat().st_size
    assert 198_000 < size <= 200_000
    found, is_torn = read(tmp_path / "file")
    assert found == calls[: len(found)]
    assert not is_torn
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'file'} ends: it has its 200000 bytes; decisions are no longer recorded"
    ]


def test_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = record(tmp_path / "file", [])
    assert recorder._file is not None
    recorder._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        recorder._file = full
        with caplog.at_level(logging.WARNING):
            for i in range(200):
                recorder.write(Call(i, "x" * 1000))
            recorder.close()
    assert [record.message.partition("ends: ")[2] for record in caplog.records] == [
        "No space left on device; decisions are no longer recorded"
    ]


def test_file_that_tells_again_when_it_is_closed_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    """As files over NFS do, of what could not be written."""

    class Full(FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    recorder = record(tmp_path / "file", [])
    assert recorder._file is not None
    recorder._file.close()
    recorder._file = Full(tmp_path / "file", "w")
    recorder.write(Call(1, "x"))
    recorder.flush()
    recorder.close()


def test_disk_that_is_full_from_the_start_means_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuse)
    assert RecordingConfig(folder=str(tmp_path)).open("m") is None, "a rank that begins again has to serve"
    (record,) = caplog.records
    assert record.message.endswith(": No space left on device; decisions are not recorded")


def test_files_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weft decisions 2 scheduler\n")
    with pytest.raises(RecordingVersionError, match="of version 2; allowed: 3"):
        Recording(path)
    for content in (b"", b"\x93NUMPY", b"weft decisions 3 scheduler", b"weft decisions x scheduler\n", b"\n"):
        path.write_bytes(content)
        with pytest.raises(RecordingError, match="not a recording"):
            Recording(path)
    path.write_bytes(b"weft decisions 3 scheduler\n")
    with pytest.raises(RecordingError, match="ends before its header"):
        Recording(path).read_header(Call)
    path.write_bytes(b"weft decisions 3 scheduler\n\x01\0\0\0\x07")
    with pytest.raises(RecordingError, match="the header cannot be read"):
        Recording(path).read_header(Call)
    with pytest.raises(RecordingError, match="No such file"):
        Recording(tmp_path / "none")


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="folder is 'decisions'; allowed: an absolute path"):
        RecordingConfig(folder="decisions")
    with pytest.raises(RecordingError, match="max_bytes is 5; allowed: at least 65536"):
        RecordingConfig(max_bytes=5)
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"Not a directory|File exists"):
        RecordingConfig(folder=str(tmp_path / "file")).open("tiny-0.1")
