"""Look up every version of constraints.txt for known vulnerabilities with pip-audit, in its own environment.

    make audit        (python3 .ci/audit.py)

Exit codes: 0 if all versions were looked up and none is known to be vulnerable, 1 if some are, 3 if not all were
looked up. pip-audit reports "no known vulnerabilities" for versions that the service does not know; here they
count as not audited. Uses the standard library only.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / ".ci" / "requirements-audit.txt"
FOLDER = ROOT / ".audit"
NOT_AUDITED = 3


def install() -> list[str]:
    """Install pip-audit unless the required versions are installed; return the command that runs it."""
    python, marker, required = FOLDER / "bin" / "python", FOLDER / "installed.txt", REQUIREMENTS.read_text()
    if not (marker.exists() and marker.read_text() == required):
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        subprocess.run([*pip, "-r", REQUIREMENTS], check=True)
        marker.write_text(required)
    return [str(python), "-m", "pip_audit"]


def audit(command: list[str], versions: Path) -> tuple[int, list[str]]:
    """Run pip-audit on a file of versions; return the exit code and the lines to print."""
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    done = subprocess.run([*command, *options, "-r", versions], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return NOT_AUDITED, [f"not audited: the vulnerability service cannot be reached ({last[:200]})"]
    flaws = [
        f"{package['name']} {package['version']}: {flaw['id']}, "
        f"fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for package in packages
        for flaw in package.get("vulns", [])
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    count = f"{len(packages) - len(skipped)} of {len(packages)} versions looked up"
    if flaws:
        return 1, [*flaws, f"{len(flaws)} known vulnerabilities; {count}"]
    if skipped or not packages:
        names = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        return NOT_AUDITED, [f"not audited: the vulnerability service has no answer for {names}; {count}"]
    return 0, [f"no known vulnerabilities; {count}"]


def main() -> int:
    """Install pip-audit, run it and print the result; return the exit code."""
    try:
        command = install()
    except subprocess.CalledProcessError as error:
        print(f"not audited: pip-audit cannot be installed (exit code {error.returncode})")
        return NOT_AUDITED
    code, lines = audit(command, ROOT / "constraints.txt")
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
