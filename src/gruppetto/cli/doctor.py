"""`gruppetto doctor`: what this machine has and what would not work here; with `--profile`, how fast it is."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.extras import needs


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, what would not work, and how fast it is",
        description="Lists Python, packages, processor, memory and GPUs, and says what would not work here. With "
        "--profile it measures one thread of the processor, the embedded engine and the trainer, in below a minute.",
        epilog="Example: gruppetto doctor --profile, then gruppetto plan --against runs/latest --gpu profile.toml",
    )
    parser.add_argument("--profile", action="store_true", help="measure this machine, and write what it reaches")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="model to measure with (a random one of the demo's shape); with --engine: whose log-probabilities the "
        "server's are compared with",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="where the profile goes (profile.toml), or the engine's table (.md or .json)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="model.dtype of the runs to come (float32); with --engine: what the server computes in (config.json's)",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="measure the engine as run.deterministic = true runs it"
    )
    parser.add_argument("--engine", metavar="URL", help="try what a running SGLang or vLLM server can really do")
    parser.add_argument(
        "--load", metavar="FOLDER", help="with --engine: load this model's weights there, as a run does, and compare"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.engine:
        return _engine(args)
    if args.load:
        raise UserError(f"--load {args.load} without --engine has nowhere to go; write gruppetto doctor --engine URL …")
    if not args.profile:
        _refuse_alone(args)
        return _examine()
    return _profile(args)


def _engine(args: argparse.Namespace) -> int:
    from gruppetto.cli.doctor_engine import Trial, try_engine

    if args.profile:
        raise UserError("--profile measures this machine, --engine a server; leave one of them out")
    load, model, out = (Path(value) if value else None for value in (args.load, args.model, args.out))
    return try_engine(Trial(url=args.engine, load=load, model=model, dtype=args.dtype), out)


def _refuse_alone(args: argparse.Namespace) -> None:
    """Options that belong to a profile."""
    for name, value in (("model", args.model), ("out", args.out), ("deterministic", args.deterministic)):
        if value:
            raise UserError(f"--{name} without --profile does nothing; write gruppetto doctor --profile --{name} …")


def _examine() -> int:
    """All checks, one line each."""
    from gruppetto.doctor import CHECKS, examine

    found = examine(CHECKS)
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"{'ok ' if one.works else 'no '} {one.name:{width}}  {one.says}")
    missing = [one for one in found if not one.works]
    if missing:
        print("\nwould not work here:")
        for one in missing:
            print(f"  {one.without}")
    return 0


def _profile(args: argparse.Namespace) -> int:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UserError(needs("--profile", missing[0], "it measures the embedded engine and trainer"))
    out, model = Path(args.out or "profile.toml"), Path(args.model) if args.model else None
    _refuse_places(out, model, args)
    _quiet()
    from gruppetto.clock import wall
    from gruppetto.ledger.machines.profile import profile_text
    from gruppetto.profile.measure import measure

    today = datetime.fromtimestamp(wall()).date().isoformat()

    def tell(text: str) -> None:
        print(text, flush=True)

    found = measure(model, dtype=args.dtype or "float32", deterministic=args.deterministic, today=today, tell=tell)
    try:
        out.write_text(profile_text(found.gpu, found.efficiency, found.notes), "utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; write another path") from None
    print("\n".join(found.notes))
    print(f"written: {out}; next: gruppetto plan --against runs/latest --gpu {out}")
    return 0


def _refuse_places(out: Path, model: Path | None, args: argparse.Namespace) -> None:
    """What can be refused before anything is measured."""
    if out.suffix.lower() != ".toml":
        raise UserError(f"--out {out}: a profile is a TOML file; write --out {out.with_suffix('.toml')}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; write a path in a folder that exists")
    if model is not None and not (model / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json there; write the folder of a Hugging Face model")
    if args.deterministic and args.dtype != "float32":
        raise UserError("--deterministic with --dtype bfloat16: such a run is in float32; leave one of them out")


def _quiet() -> None:
    """As a run has it: one thread that does not spin, and no hub."""
    from gruppetto.cli.settings import quiet_threads
    from gruppetto.config.schema import Config

    quiet_threads(Config())
