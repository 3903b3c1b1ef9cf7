"""The [engine] and [weights] tables: what samples, and how new weights reach it.

What a setting has no use for is refused by `preflight`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gruppetto.config.section import Count, Positive, Seconds, Section


class EngineSection(Section):
    """[engine]: what samples."""

    type: Literal["embedded", "sglang", "vllm"] = "embedded"
    """embedded: in this process, on a thread of its own, CPU or CUDA; sglang, vllm: servers reached over HTTP, started
    and watched here, or running already (`urls`). gruppetto serve speaks sglang."""
    count: Count = 1
    """Engines that are started here."""
    urls: list[str] = []
    """Servers that run already, one engine each; their key in the environment variable GRUPPETTO_ENGINE_API_KEY."""
    python: str = ""
    """Python that has sglang or vllm, best in a virtual environment of its own; empty = this one."""
    command: list[str] = []
    """Started in place of sglang's or vllm's usual command; {model}, {host}, {port} and {index} are filled in."""
    start_s: Seconds = 900.0
    """A server that has not answered this long after its start has failed."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Times an engine that died or hung is brought back, with the newest weights; 0 = it is out of the run."""
    stream: bool = False
    """Answers come token by token, so that a server's death costs none; takes this process's CPU for each of them."""
    slots: Count = 64
    """Sequences decoded together."""
    context: Positive = 1024
    """Longest prompt + response, in tokens. Not set: this, or the model's positions where those are fewer."""
    admit_batch: Positive = 4
    """Free slots to wait for before a prefill while others decode; 1 = at once."""
    prefill_chunk: Positive = 256
    """Prompt tokens of one prefill call, which bounds how long an abort can take."""
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    """The KV of live rollouts when weights change under them: kept from the old ones, or computed anew."""
    args: dict[str, Any] = {}
    """Passed to the server's command verbatim, after our own: {mem_fraction_static = 0.8} is --mem-fraction-static 0.8,
    true a flag alone, a list several values."""


class WeightsSection(Section):
    """[weights]: how new weights reach the engines."""

    channel: Literal["auto", "inprocess", "shm", "disk", "gloo"] = "auto"
    """inprocess: copied, never aliased; shm: shared memory of this host; disk: safetensors in the run's folder; gloo: a
    broadcast over TCP. auto: inprocess for engines in this process, shm for deltas; for servers it asks them: shm where
    all run on this host, gloo where one does not, disk where one reads weights from disk only (SGLang, vLLM)."""
    mode: Literal["full", "delta"] = "full"
    """full: everything each time; delta: what changed, where that is less."""
    bucket_mb: Positive = 64
    """Size of a bucket; two are held."""
    verify_every: Annotated[int, Field(ge=0)] = 16
    """After its first version and every so many an engine is probed: a few tokens of fixed prompts, whose logprobs are
    compared with the trainer's; over shm, gloo and our own disk it reads back all it holds, too (0: the first only)."""
    probe_kl: Annotated[float, Field(ge=0)] = 0.02
    """An engine whose probe differs by more, in nats a token (mismatch_kl), is taken for one with wrong weights and is
    lost; 0 = no probe, for engines that compute coarser than the trainer."""
    pause: Literal["auto", "keep", "abort"] = "auto"
    """What becomes of requests that run while weights change. keep: held, and go on under the new ones; abort: they
    come back with what they made, and are resumed later. auto: keep where rollouts go on while the trainer trains."""
    release_kv: bool = False
    """Engines give the KV's memory back while weights are on their way; needs pause = "abort"."""
