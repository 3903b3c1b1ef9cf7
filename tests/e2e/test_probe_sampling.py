"""A run's engines are probed with the run's own sampling."""

from gruppetto.engines.embedded.engine import EmbeddedEngine


def test_a_probe_samples_as_the_run_does(train, monkeypatch):
    plain, probed = EmbeddedEngine.generate, []

    async def generate(engine, request):
        if request.rid.startswith("probe-"):
            probed.append(request.sampling)
        return await plain(engine, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    code, _ = train("run.steps=2", "rollout.temperature=0.6", "rollout.top_p=0.9", "rollout.top_k=40")
    assert code == 0
    assert probed
    assert {(s.temperature, s.top_p, s.top_k) for s in probed} == {(0.6, 0.9, 40)}
