"""What the command line says of words that it does not know."""

from __future__ import annotations

import pytest

from kakeya.cli.main import main


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("statsu", "no command 'statsu'; did you mean status?; see kakeya --help"),
        ("chat --modle=x", "no option --modle; did you mean --model?; see kakeya chat --help"),
        ("models pull x --node a:1", "no option --node here: the command acts as the owner"),
        ("models list x y", "unexpected: x y; see kakeya models list --help"),
        ("jobs --json shwo", "'shwo' (choose from 'list', 'show', 'cancel')"),
        ("jobs show --jsn JOB", "no option --jsn; did you mean --json?; see kakeya jobs --help"),
    ],
)
def test_an_unknown_word_is_named_with_the_nearest_known_one(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_no_word_at_all_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "show the node's models, memory and peers" in capsys.readouterr().out
