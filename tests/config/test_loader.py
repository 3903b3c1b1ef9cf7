"""Precedence, origins, variants and paths of the config loader."""

from pathlib import Path

import pytest

from gruppetto.config.fields import by_key, fields
from gruppetto.config.loader import load, recipes
from gruppetto.config.schema import Config
from gruppetto.errors import UserError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into an empty current directory."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8")
        return name

    return _write


def test_no_file_gives_the_defaults():
    loaded = load([])
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.source_text == ""


def test_the_later_layer_wins_key_by_key_and_origins_say_so(write):
    write("base.toml", "[run]\nsteps = 1\nseed = 1\n[train]\nlr = 1e-5\nwarmup_steps = 3\n")
    write("run.toml", 'extends = "base.toml"\n[run]\nseed = 2\nname = "a"\n')
    write("more.toml", '[run]\nname = "b"\n')
    loaded = load(["run.toml", "more.toml"], ["train.lr=3e-5", "rollout.stop=['x']"])
    run, train = loaded.config.run, loaded.config.train
    assert (run.steps, run.seed, run.name, train.lr, train.warmup_steps) == (1, 2, "b", 3e-5, 3)
    assert loaded.config.rollout.stop == ["x"]
    assert {k: o for k, o in loaded.origins.items() if o != "default"} == {
        "run.steps": "base.toml:2",
        "run.seed": "run.toml:3",
        "run.name": "more.toml:2",
        "train.lr": "command line",
        "train.warmup_steps": "base.toml:6",
        "rollout.stop": "command line",
    }


def test_the_default_context_is_within_the_models_positions(write):
    write("small/config.json", '{"max_position_embeddings": 512}')
    write("large/config.json", '{"text_config": {"max_position_embeddings": 40960}}')
    write("odd/config.json", '["no model"]')
    small = load([], ["model.path=small"])
    assert (small.config.engine.context, small.origins["engine.context"]) == (512, "small/config.json")
    write("again.toml", small.source_text)
    assert load(["again.toml"]).config == small.config
    assert load([], ["model.path=small", "engine.context=600"]).config.engine.context == 600  # refused by preflight
    for other in ("large", "odd", "nowhere"):
        loaded = load([], [f"model.path={other}"])
        assert (loaded.config.engine.context, loaded.origins["engine.context"]) == (1024, "default")


def test_extends_counts_from_the_file_that_says_it(write):
    write("deep/base.toml", "[run]\nsteps = 7\n")
    write("deep/run.toml", 'extends = "base.toml"\n')
    assert load(["deep/run.toml"]).config.run.steps == 7
    assert load(["deep/run.toml"]).origins["run.steps"] == "deep/base.toml:2"


def test_free_tables_are_merged_and_inline_tables_have_their_line(write):
    write("run.toml", "[engine]\nslots = 8\nargs = {a = 1, b = 2}\n")
    loaded = load(["run.toml"], ["engine.args.b=3", "engine.args.c.d=x"])
    assert loaded.config.engine.args == {"a": 1, "b": 3, "c": {"d": "x"}}
    assert loaded.origins["engine.args.a"] == "run.toml:3"
    assert loaded.origins["engine.args.c.d"] == "command line"


def test_text_settings_take_the_characters_as_they_are():
    config = load([], ["run.name=2024", "model.path=1e3", 'reward.pattern="a b"', "data.path=x.jsonl@[:5]"]).config
    assert (config.run.name, config.model.path, config.reward.pattern) == ("2024", "1e3", "a b")
    assert config.data.path == "x.jsonl@[:5]"


def test_none_unsets_what_may_be_unset(write):
    write("run.toml", '[scheduler]\ntype = "partial"\nmax_staleness = 2\n')
    assert load(["run.toml"]).config.scheduler.max_staleness == 2
    assert load(["run.toml"], ["scheduler.max_staleness=none"]).config.scheduler.max_staleness is None
    assert load([], ["run.name=none"]).config.run.name == "none"


def test_one_scheduler_setting_keeps_the_files_preset_and_another_preset_its_settings(write):
    write("run.toml", '[scheduler]\ntype = "partial"\ndepth = 3.0\n')
    scheduler = load(["run.toml"], ["scheduler.max_parked_steps=4"]).config.scheduler
    assert (scheduler.type, scheduler.depth, scheduler.max_parked_steps) == ("partial", 3.0, 4)
    scheduler = load(["run.toml"], ["scheduler.type=layered", "scheduler.depth=none"]).config.scheduler
    assert (scheduler.type, scheduler.depth) == ("layered", None)


def test_recipes_have_a_folder_that_may_be_left_out(write):
    assert {"demo", "sim/family-a", "sim/reasoning-32k"} <= set(recipes())
    full, bare = load(["sim/family-b"]), load(["family-b"])
    assert full.config == bare.config
    assert full.origins["sim.workload"].startswith("recipe sim/family-b:")
    write("sim/family-b", "[run]\nsteps = 3\n")
    assert load(["sim/family-b"]).config == full.config
    write("my/run", "[run]\nsteps = 3\n")
    assert load(["my/run"]).config.run.steps == 3


def test_the_repositorys_recipes_are_those_of_the_package():
    shown = Path(__file__).parents[2] / "recipes" / "sim"
    for path in sorted(shown.glob("*.toml")):
        assert load([path]).config == load([f"sim/{path.stem}"]).config
    assert {path.stem for path in shown.glob("*.toml")} == {n.partition("/")[2] for n in recipes() if "/" in n}


def test_the_document_of_a_run_loads_to_the_same_config(write):
    write("base.toml", '[scheduler]\ntype = "partial"\n[engine.args]\n"a.b" = [1, {c = "\\u00e9"}]\n')
    write("run.toml", 'extends = "base.toml"\n[data]\nargs.x = 1\npath = "a\\"b\\\\c.jsonl"\n')
    loaded = load(["run.toml"], ["rollout.stop=['\\n']", "scheduler.max_staleness=none", "train.betas=[0.9, 0.95]"])
    write("again.toml", loaded.source_text)
    assert load(["again.toml"]).config == loaded.config


def test_a_byte_order_mark_and_windows_lines_are_fine(write):
    Path("run.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nsteps = 3\r\n")
    assert load(["run.toml"]).origins["run.steps"] == "run.toml:2"


def test_every_default_passes_as_an_override():
    for field in fields():
        if field.default is None or field.type == "object":
            continue
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        loaded = load([], [f"{field.key}={value}"])
        assert loaded.origins[field.key] == "command line"


def test_every_field_is_documented_and_few_enough():
    undocumented = [field.key for field in fields() if not field.doc]
    assert undocumented == []
    assert len(by_key()) <= 150


def test_a_cycle_is_refused(write):
    write("a.toml", 'extends = "b.toml"\n')
    write("b.toml", 'extends = "a.toml"\n')
    with pytest.raises(UserError, match=r"a\.toml -> b\.toml -> a\.toml"):
        load(["a.toml"])
