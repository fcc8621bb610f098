"""Look every version of constraints.txt up for known vulnerabilities, with pip-audit in an environment of its own.

    make audit        (python3 .ci/audit.py)

Exit codes: 0 all versions were looked up and none is known to be vulnerable, 1 some are, 3 not all were looked up.
pip-audit itself says "no known vulnerabilities" of versions that the service has no answer for; here they count as
not audited. Standard library only.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / ".ci" / "requirements-audit.txt"
FOLDER = ROOT / ".audit"
NOT_AUDITED = 3


def install() -> Path:
    """Return pip-audit, installed unless these very versions are there already."""
    tool, marker, wanted = FOLDER / "bin" / "pip-audit", FOLDER / "installed.txt", REQUIREMENTS.read_text()
    if not (marker.exists() and marker.read_text() == wanted):
        pip = [FOLDER / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        subprocess.run([*pip, "-r", REQUIREMENTS], check=True)
        marker.write_text(wanted)
    return tool


def audit(tool: Path, versions: Path) -> tuple[int, list[str]]:
    """Return the exit code and what to say."""
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    done = subprocess.run([tool, *options, "-r", versions], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return NOT_AUDITED, [f"not audited: the vulnerability service cannot be reached ({last[:200]})"]
    said = [
        f"{one['name']} {one['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for one in found
        for flaw in one.get("vulns", [])
    ]
    skipped = [one["name"] for one in found if "skip_reason" in one]
    asked = f"{len(found) - len(skipped)} of {len(found)} versions looked up"
    if said:
        return 1, [*said, f"{len(said)} known vulnerabilities; {asked}"]
    if skipped or not found:
        names = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        return NOT_AUDITED, [f"not audited: the vulnerability service has no answer for {names}; {asked}"]
    return 0, [f"no known vulnerabilities; {asked}"]


def main() -> int:
    """Install, ask, say."""
    try:
        tool = install()
    except subprocess.CalledProcessError as error:
        print(f"not audited: pip-audit cannot be installed (exit code {error.returncode})")
        return NOT_AUDITED
    code, lines = audit(tool, ROOT / "constraints.txt")
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
