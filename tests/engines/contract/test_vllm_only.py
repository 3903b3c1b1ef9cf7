"""What only vLLM has: two kinds of logprobs, of which one fits."""

import pytest
from engines.contract.kinds import CONTEXT, SLOTS

from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import WireSettings
from gruppetto.errors import UserError

pytestmark = pytest.mark.timeout(420)


@pytest.mark.parametrize(
    ("temperature", "truncated", "fits"), [(0.7, False, True), (1.0, True, False), (1.0, False, True)]
)
async def test_vllms_logprobs_have_to_be_the_ones_that_the_sampling_needs(
    vllm_url, tiny_model, tmp_path, temperature, truncated, fits
):
    """The tests' server has processed ones."""
    engine = http_engine(
        "vllm",
        "e",
        HttpSettings(slots=SLOTS, context=CONTEXT),
        Staging(tmp_path, tiny_model),
        url=vllm_url,
        wire=WireSettings(temperature=temperature, truncated=truncated),
    )
    try:
        if fits:
            await engine.start()
        else:
            with pytest.raises(UserError, match="--logprobs-mode raw_logprobs"):
                await engine.start()
    finally:
        await engine.close()
