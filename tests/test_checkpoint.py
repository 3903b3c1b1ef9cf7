"""Checkpoints under kills at every step of a save, damage, and disks that lose what was not flushed."""

import os
import shutil
from pathlib import Path

import pytest

from gruppetto.checkpoint import MARKER, Checkpoints
from gruppetto.errors import UserError


class FilesTrainer:
    """Saves two files that say which save they are of."""

    def __init__(self) -> None:
        self.content = "a"

    async def save(self, folder: Path) -> None:
        for part in ("hf", "trainer"):
            (folder / part).mkdir()
            (folder / part / "data").write_text(self.content)


class Killed(BaseException):
    """Nothing of ours runs after a kill."""


@pytest.fixture
def trainer():
    return FilesTrainer()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def content(path: Path) -> set[str]:
    assert (path / MARKER).is_file()
    return {(path / part / "data").read_text() for part in ("hf", "trainer")} | {
        Checkpoints.read_state(path)["content"]
    }


def names(checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


async def save(checkpoints, trainer, step, content):
    trainer.content = content
    return await checkpoints.save(step, trainer, {"content": content})


async def test_the_newest_are_kept(checkpoints, trainer):
    for step in (2, 10, 9, 11):
        await save(checkpoints, trainer, step, "a")
    assert [path.name for path in checkpoints.complete()] == ["step_11", "step_10"]
    assert names(checkpoints) == ["step_10", "step_11"]


CALLS = [(Path, "rename"), (shutil, "rmtree"), (os, "fsync"), (Path, "mkdir"), (Path, "write_text")]


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
@pytest.mark.parametrize("when", ["before", "midway", "after"])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("next_step", [3, 4], ids=["the same step again", "another step"])
async def test_a_kill_anywhere_leaves_a_whole_checkpoint(
    tmp_path, trainer, monkeypatch, owner, name, when, keep, next_step
):
    """For every n: the n-th call of the function is the process's last."""
    real, lived = getattr(owner, name), False
    for n in range(40):
        checkpoints = Checkpoints(tmp_path / str(n), keep)
        await save(checkpoints, trainer, 3, "a")
        calls = iter(range(n, -1, -1))

        def dying(*args, real=real, calls=calls, name=name, **kwargs):
            left = next(calls, -1)
            if left == 0 and when == "midway" and name == "rmtree":
                real(args[0] / "hf", ignore_errors=True)
            if left == 0 and when != "after":
                raise Killed
            result = real(*args, **kwargs)
            if left == 0:
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            try:
                await save(checkpoints, trainer, next_step, "b")
                lived = next(calls, -1) > -1
            except Killed:
                pass
        checkpoints = Checkpoints(checkpoints.folder, keep)
        checkpoints.mend()
        assert checkpoints.complete(), f"call {n}"
        assert all(content(path) in ({"a"}, {"b"}) for path in checkpoints.complete()), f"call {n}"
        await save(checkpoints, trainer, 5, "c")
        assert content(checkpoints.complete()[0]) == {"c"}
        assert all(len(content(path)) == 1 for path in checkpoints.complete())
        assert all(entry.startswith("step_") for entry in names(checkpoints))
        if lived:
            return
    pytest.fail("the save never came to its end")


async def test_all_bytes_are_on_the_disk_before_the_marker_and_the_marker_before_the_name(
    checkpoints, trainer, monkeypatch
):
    log: list[str] = []
    fsync, rename, write_text = os.fsync, Path.rename, Path.write_text

    def said(handle):
        log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).relative_to(checkpoints.folder)}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", said)
    monkeypatch.setattr(Path, "rename", lambda p, to: (log.append(f"rename {p.name} {to.name}"), rename(p, to))[1])
    monkeypatch.setattr(
        Path, "write_text", lambda p, text: (p.name == MARKER and log.append("marker"), write_text(p, text))[1]
    )
    await save(checkpoints, trainer, 1, "a")
    marker, renamed = log.index("marker"), log.index("rename .step_1.part step_1")
    parts = ("hf/data", "hf", "trainer/data", "trainer", "scheduler.json")
    assert set(log[:marker]) == {f"sync .step_1.part/{part}" for part in parts} | {"sync .step_1.part"}
    assert log[marker + 1 : renamed] == ["sync .step_1.part/COMPLETE", "sync .step_1.part"]
    assert log[renamed + 1 :] == ["sync ."]


async def test_what_is_broken_is_named_and_what_is_rejected_does_not_count(checkpoints, trainer):
    for step in (1, 2):
        await save(checkpoints, trainer, step, "a")
    (checkpoints.folder / ".step_9.part").mkdir()
    checkpoints.reject([checkpoints.folder / "step_2"])
    assert [path.name for path in checkpoints.broken()] == ["step_2", ".step_9.part"]
    await save(checkpoints, trainer, 1, "b")
    assert content(checkpoints.complete()[0]) == {"b"}
    await save(checkpoints, trainer, 2, "c")
    assert content(checkpoints.complete()[0]) == {"c"}
    assert names(checkpoints) == ["step_1", "step_2"]


@pytest.mark.parametrize("text", ["", "[1]", '{"scheduler": '])
async def test_a_state_that_cannot_be_read_is_one_line(checkpoints, trainer, text):
    path = await save(checkpoints, trainer, 1, "a")
    (path / "scheduler.json").write_text(text)
    with pytest.raises(UserError, match=r"step_1 is damaged: scheduler\.json: .*; resume from an earlier one$"):
        checkpoints.read_state(path)
