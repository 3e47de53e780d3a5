"""`tools/messages.py`: messages are found however they are put together, and one that is gone is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import messages

OLD = '''
"""A module that documents itself at length."""

ADVICE = "write another name instead"

def check(n: int, names: str) -> None:
    """Say at length what this does."""
    if n < 2:
        raise SpecError(f"{n} ranks are too few: " f"start {2} of them" + (" or more than that" if names else ""))
    if n > 9:
        raise ValueError("there are too " + names + " many ranks")
    warnings.warn("no link", stacklevel=2)
    parser.error("name a script to run")
'''
NEW = OLD.replace('raise ValueError("there are too', 'raise ValueError("there are far too').replace(
    "{n} ranks", "{count} ranks"
)


@pytest.mark.one_draw_in(2)
def test_two_versions_are_compared_by_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source in (("old", OLD), ("new", NEW), ("less", NEW.replace('"no link"', "text"))):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "check.py").write_text(source)
    old, new, less = (str(tmp_path / name) for name in ("old", "new", "less"))
    assert {(message.by, text) for text, message in messages.messages(old).items()} == {
        ("text", "write another name instead"),
        ("SpecError", "{} ranks are too few: start {} of them{}"),
        ("SpecError", "or more than that"),
        ("ValueError", "there are too {} many ranks"),
        ("warn", "no link"),
        ("error", "name a script to run"),
    }
    assert messages.main([old, old]) == 0
    assert capsys.readouterr().out.strip() == ""
    assert messages.main([old, new]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "gone  src/check.py:11 ValueError: there are too {} many ranks",
        "  now src/check.py:11 ValueError: there are far too {} many ranks",
        "new   src/check.py:11 ValueError: there are far too {} many ranks",
    ]
    assert messages.main([new, less]) == 1
    assert capsys.readouterr().out.splitlines() == ["gone  src/check.py:12 warn: no link"]
    assert len(messages.messages("HEAD")) > 1000
