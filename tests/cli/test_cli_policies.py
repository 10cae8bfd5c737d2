"""`--policy file.py:Class`: a policy of one's own in the programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_fakes import run
from fake_story import resume, tiny_model

pytestmark = pytest.mark.usefixtures("surroundings")

OWN = '''
from dataclasses import dataclass
from pathlib import Path

from pyh2o.policies import Policy

@dataclass(frozen=True)
class Own(Policy):
    """The paper's with power 0; it notes that it was asked, and fails with power 9."""

    needs = ("attention",)
    power: float = 0.0

    def score(self, rows):
        (Path(__file__).parent / "asked").touch()
        return rows.attention / rows.ages**self.power if self.power < 9 else rows.attention[1:]
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def generate(tiny: Path, policy: str, *more: str) -> list[str]:
    """300 tokens in a small cache."""
    cache = ["--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8", "--recall", "0"]
    model = ["-m", str(tiny), *cache, "--policy", policy]
    return ["generate", "-p", "Once upon a time", *model, "-n", "300", "--seed", "3", *more]


def test_a_policy_of_a_file_writes_what_its_twin_does(tiny: Path, own: Path) -> None:
    mine, papers = (run(*generate(tiny, policy)) for policy in (f"{own}:Own", "h2o"))
    assert (mine.code, mine.text) == (0, papers.text)
    assert (own.parent / "asked").exists()
    other = run(*generate(tiny, f"{own.name}:Own:power=1"))
    assert (other.code, other.text) == (0, run(*generate(tiny, "h2o-mean")).text)


def test_what_is_wrong_with_a_policy_is_one_line(tiny: Path, own: Path) -> None:
    missing = run(*generate(tiny, "none.py:Own"))
    assert (missing.code, missing.text) == (1, "")
    assert missing.notes == f"error: no such file {own.parent / 'none.py'}: {GIVE}\n"
    failing = run(*generate(tiny, f"{own}:Own:power=9"))
    assert failing.code == 1
    assert failing.notes.splitlines()[-1].startswith(f"error: {own}:Own:power=9: score() returns ")


GIVE = "give a policy as FILE.py:CLASS"


def test_a_session_executes_no_file(tiny: Path, own: Path) -> None:
    """A policy in a file must be given again; without it, the text is read again."""
    begun = run(*generate(tiny, f"{own}:Own", "-o", "story.txt"))
    assert begun.code == 0
    (own.parent / "asked").unlink()
    output = resume("-n", "350")
    assert output.code == 0
    assert "made with --policy own:Own, and the model is loaded with --policy h2o" in output.notes
    assert not (own.parent / "asked").exists()
    assert resume("-n", "400", "--policy", f"{own}:Own").code == 0
    assert (own.parent / "asked").exists()
