"""The process pool: what hangs or dies costs one score, never the loop, another score or a process left behind."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest

from gruppetto.errors import RunError, UserError
from gruppetto.rewards.pool import ProcessPoolReward
from gruppetto.rewards.process import VerifierProcess
from gruppetto.rewards.verifiers import VerifierSpec

PATIENT_S = 4.0
"""A deadline that is waited for, and that no call which answers misses on a machine that stalls."""


@asynccontextmanager
async def pool(path, decode=lambda ids: "", **options):
    reward = ProcessPoolReward(VerifierSpec("function", str(path)), decode, **options)
    await reward.start()
    try:
        yield reward
    finally:
        await reward.close()


async def ask(reward, response, answer="4"):
    return await reward.verify("p", response, answer, {})


def gone(pid):
    """Whether no such process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until_gone(pid):
    for _ in range(6000):
        if gone(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.parametrize(
    ("response", "reward", "error"),
    [
        ("right", 1.0, None),
        ("half", 0.5, None),
        ("alarm", 0.25, None),
        ("hang", None, "timeout after 0.3 s"),
        ("regex", None, "timeout after 0.3 s"),
        ("exit", None, "died: the verifier's process exited with code 3"),
        ("segfault", None, "died: the verifier's process was killed by SIGSEGV"),
        ("sysexit", None, "raised SystemExit: 4"),
        ("raise", None, "raised ValueError: no"),
        ("nan", None, "returned nan, which is not finite"),
        ("none", None, "returned 'None' of type NoneType, not a number"),
        ("text", None, "returned '1.0' of type str, not a number"),
    ],
)
async def test_each_outcome_and_the_pool_goes_on(script, rollout, decode, response, reward, error):
    timeout_s = 0.3 if error and error.startswith("timeout") else 30.0
    async with pool(f"{script}:score", decode, timeout_s=timeout_s) as verifiers:
        score = await verifiers.score(rollout(response))
        assert (score.reward, score.error) == (reward, error)
        verifiers._timeout_s = 30.0
        assert (await verifiers.score(rollout("pid"))).reward > 1


async def test_one_hung_call_delays_no_other_and_the_loop_runs_on(script):
    async with pool(f"{script}:score", processes=2, timeout_s=PATIENT_S) as verifiers:
        hung = asyncio.create_task(ask(verifiers, "hang"))
        await asyncio.sleep(0)
        scores = await asyncio.gather(*(ask(verifiers, "right") for _ in range(7)))
        assert [score.reward for score in scores] == [1.0] * 7
        assert not hung.done(), "seven were scored while one hung"
        assert (await hung).error == f"timeout after {PATIENT_S:g} s"


async def test_waiting_for_a_process_does_not_count_as_its_time(script):
    async with pool(f"{script}:score", timeout_s=PATIENT_S) as verifiers:
        scores = await asyncio.gather(*(ask(verifiers, name) for name in ("hang", "right", "hang", "right")))
        assert [score.reward for score in scores] == [None, 1.0, None, 1.0]


async def test_a_hung_verifier_is_killed_with_all_that_it_started(script, tmp_path):
    async with pool(f"{script}:score", timeout_s=PATIENT_S) as verifiers:
        await ask(verifiers, "grandchild", str(tmp_path / "pid"))
        await until_gone(int((tmp_path / "pid").read_text()))


async def test_a_verifier_leads_a_group_in_our_session(script):
    """A session of its own would be given cores as if it were a run; and a group is what is killed with it."""
    scored = VerifierProcess(VerifierSpec("function", str(script)))
    try:
        assert os.getsid(scored._process.pid) == os.getsid(0)
        assert os.getpgid(scored._process.pid) == scored._process.pid != os.getpgid(0)
    finally:
        scored.kill()
        scored.reap()
        scored.release()


async def test_a_process_that_died_idle_is_replaced_without_a_failed_score(script):
    async with pool(f"{script}:score") as verifiers:
        pid = int((await ask(verifiers, "pid")).reward)
        os.kill(pid, signal.SIGKILL)
        await until_gone(pid)
        score = await ask(verifiers, "pid")
        assert score.reward not in (None, pid)


async def test_an_alarm_left_behind_rings_for_nobody(script):
    async with pool(f"{script}:score") as verifiers:
        await ask(verifiers, "leftover_alarm")
        pid = (await ask(verifiers, "pid")).reward
        await asyncio.sleep(0.1)
        assert (await ask(verifiers, "pid")).reward == pid


async def test_a_cancelled_call_does_not_answer_the_next(script):
    async with pool(f"{script}:score", timeout_s=30.0) as verifiers:
        call = asyncio.create_task(ask(verifiers, "hang"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [(await ask(verifiers, "half")).reward for _ in range(3)] == [0.5] * 3


async def test_every_call_gets_its_own_answer_whatever_happens_to_others(script):
    draw = random.Random(0)
    kinds = ["echo"] * 12 + ["slow_echo"] * 6 + ["exit", "hang", "raise"]
    async with pool(f"{script}:score", processes=3, timeout_s=PATIENT_S) as verifiers:
        asked = [(draw.choice(kinds), number) for number in range(120)]
        calls = [asyncio.create_task(ask(verifiers, kind, number)) for kind, number in asked]
        for call in draw.sample(calls, 20):
            await asyncio.sleep(0.005)
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert len(verifiers._processes) == 3
    for (kind, number), outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            continue
        assert outcome.reward == (number if kind.endswith("echo") else None), (kind, outcome)


async def test_rewards_do_not_depend_on_hash_seeds(script):
    values = set()
    for _ in range(2):
        async with pool(f"{script}:score") as verifiers:
            values.add((await ask(verifiers, "hash")).reward)
    assert len(values) == 1


async def test_close_ends_everything_and_may_be_repeated(script):
    async with pool(f"{script}:score", processes=2, timeout_s=60.0) as verifiers:
        pid = int((await ask(verifiers, "pid")).reward)
        calls = [asyncio.create_task(ask(verifiers, "hang")) for _ in range(4)]
        await asyncio.sleep(0.1)
        await verifiers.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(o, RunError) for o in outcomes) == 2, "those that waited for a process"
        assert (
            sum(getattr(o, "error", "") == "died: the verifier's process was killed by SIGKILL" for o in outcomes) == 2
        )
        assert gone(pid)
        await verifiers.close()
        with pytest.raises(RunError, match="not running"):
            await ask(verifiers, "right")
        await verifiers.start()
        assert (await ask(verifiers, "right")).reward == 1.0


async def test_no_file_is_left_open(script):
    before = len(os.listdir("/proc/self/fd"))
    async with pool(f"{script}:score", timeout_s=0.2) as verifiers:
        for name in ("hang", "exit", "right", "hang"):
            await ask(verifiers, name)
    assert len(os.listdir("/proc/self/fd")) <= before


PARENT = """
import asyncio, sys
from gruppetto.rewards.pool import ProcessPoolReward
from gruppetto.rewards.process import VerifierProcess
from gruppetto.rewards.verifiers import VerifierSpec

async def main():
    reward = ProcessPoolReward(VerifierSpec("function", sys.argv[1]), lambda ids: "", processes=2, timeout_s=600)
    await reward.start()
    print(int((await reward.verify("p", "pid", "4", {})).reward), flush=True)
    print(*[p._process.pid for p in reward._processes], flush=True)
    await asyncio.gather(reward.verify("p", "hang", "4", {}), reward.verify("p", "regex", "4", {}))

asyncio.run(main())
"""


def test_no_child_outlives_a_killed_parent(script):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{script}:score"], stdout=subprocess.PIPE, text=True)
    lines = [parent.stdout.readline() for _ in range(2)]
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    children = [int(pid) for pid in lines[1].split()]
    assert int(lines[0]) in children, "what a verifier prints is not in the parent's output"
    asyncio.run(until_gone(children[0]))
    asyncio.run(until_gone(children[1]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent", "has no function 'absent'"),
        ("scor", "write .*:score"),
        ("number", "is a int, not a function"),
        ("unknown", "needs a parameter 'completions'.* name any of prompt, response, answer, extra"),
        ("positional", "needs a parameter 'response'"),
        ("later", "is an async function"),
    ],
)
async def test_a_function_that_cannot_be_used_is_refused_at_the_start(script, name, text):
    reward = ProcessPoolReward(VerifierSpec("function", f"{script}:{name}"), lambda ids: "", processes=2)
    with pytest.raises(UserError, match=text) as caught:
        await reward.start()
    assert "\n" not in str(caught.value)
    assert not reward._processes


@pytest.mark.parametrize(
    "source", ["import nothing_of_that_name", "syntax error", "import os; os._exit(7)", "raise SystemExit"]
)
async def test_a_script_that_cannot_be_imported_is_one_line(tmp_path, source):
    path = tmp_path / "broken.py"
    path.write_text(source)
    reward = ProcessPoolReward(VerifierSpec("function", f"{path}:f"), lambda ids: "")
    with pytest.raises(UserError, match=r"cannot be (imported|loaded)") as caught:
        await reward.start()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("everything", 4), ("some", 7), ("defaulted", 2)])
async def test_a_function_gets_what_it_names(script, name, value):
    async with pool(f"{script}:{name}") as verifiers:
        assert (await verifiers.verify("p", "r", "a", {"x": 7})).reward == value


async def test_modules_of_the_current_folder_are_found_and_hide_nothing(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('not the standard library')\n")
    (tmp_path / "my_judge.py").write_text("import json\ndef judge(response): return len(json.loads(response))\n")
    monkeypatch.chdir(tmp_path)
    async with pool("my_judge:judge") as verifiers:
        assert (await ask(verifiers, "[1, 2]")).reward == 2.0


async def test_what_cannot_be_sent_is_said(script):
    async with pool(f"{script}:score") as verifiers:
        score = await verifiers.verify("p", "right", "4", {"f": lambda: 0})
        assert score.error.startswith("the task cannot be sent to a process")


async def test_prints_go_to_the_log(script, tmp_path):
    async with pool(f"{script}:score", log=tmp_path / "log") as verifiers:
        await ask(verifiers, "right")
        await ask(verifiers, "exit")
    assert (tmp_path / "log").read_text() == "chatter\n" * 2
