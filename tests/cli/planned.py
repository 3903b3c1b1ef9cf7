"""What `gruppetto plan` answers to a command line, as text and as data."""

import json

from gruppetto.cli.main import main


def planned(capsys, *words):
    """Exit code, standard output, standard error."""
    code = main([*words])
    out = capsys.readouterr()
    return code, out.out, out.err


def answer(capsys, *words):
    """The plan as data."""
    code, out, err = planned(capsys, *words, "--json", "-")
    assert code == 0, err
    return json.loads(out)
