"""A server process: where it stands among the others."""

import os
import sys

from gruppetto.engines.launch import EngineProcess, Launch


async def test_a_server_leads_a_group_in_our_session(tmp_path):
    """A session of its own would be given cores before us, who mostly wait, and a group is what is ended with it."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = EngineProcess(Launch(name="e", index=0, model="m", command=command, log=tmp_path / "log"))
    await process.start()
    try:
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        await process.stop()
    assert process.ended() is None
