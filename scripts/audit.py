"""Ask OSV, a public database of advisories, about every package of the environment: `make audit`.

pip-audit asks it. A package that nobody could be asked about is named, so that silence is never
taken for safety. llama.cpp and what it was patched with are no packages, and not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# Not from a registry, so no database knows it.
OURS = "pyh2o-llm"

FOUND, NOT_CHECKED = 1, 2
"""Exit codes: a package has a known hole; something could not be asked about."""

COMMAND = [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner", "off"]
COMMAND += ["--vulnerability-service", "osv", "--format", "json", "--desc", "off"]


def main() -> int:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(
            "nothing was checked, because the database did not answer: run this where it can be "
            f"reached ({reason})",
            file=sys.stderr,
        )
        return NOT_CHECKED
    lines, code = findings(packages)
    print("\n".join(lines))
    return code


def findings(packages: Iterable[Mapping[str, Any]]) -> tuple[list[str], int]:
    """What was found, as lines, and the exit code.

    Args:
        packages: pip-audit's: name, and version with vulns, or skip_reason.
    """
    asked = [each for each in packages if each["name"] != OURS]
    skipped = [each for each in asked if "skip_reason" in each]
    holes = [(each, hole) for each in asked for hole in each.get("vulns", ())]
    lines = [
        f"{each['name']} {each['version']}: {hole['id']}, {_cure(hole['fix_versions'])}"
        for each, hole in holes
    ]
    lines += [f"{each['name']}: not checked: {each['skip_reason']}" for each in skipped]
    lines.append(
        f"{len(asked) - len(skipped)} of {len(asked)} packages checked, {len(holes)} known holes"
    )
    return lines, FOUND if holes else NOT_CHECKED if skipped or not asked else 0


def _cure(versions: Iterable[str]) -> str:
    fixed = " or ".join(versions)
    return f"mended in {fixed}" if fixed else "not mended yet"


if __name__ == "__main__":
    sys.exit(main())
