"""Fuzz everything that reads files and messages: python fuzz/run.py --seconds 60 [target ...].

Each target of tests/hostile.py runs under atheris (pip install -e '.[dev,fuzz]') in a process of its own, with
limits on memory and on the time of one input. It starts from a corpus of valid inputs. The command prints the
inputs tried, the branches of fedagrac reached and the inputs that crashed; the exit code is 1 if there are any.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
MEGABYTES = 2048
"""The memory that a target may take in addition to its libraries."""

SECONDS_PER_INPUT = 20


def fuzz(name: str, arguments: list[str]) -> None:
    """Run one target in this process, without end; only fedagrac is instrumented, as libraries take too long."""
    import atheris

    sys.path.insert(0, str(TESTS))
    with atheris.instrument_imports(include=["fedagrac"]):
        import hostile

    for seed in hostile.SEEDS[name]:  # loads libraries, which must not count as time or memory
        hostile.TARGETS[name](seed)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    atheris.Setup([sys.argv[0], *arguments], hostile.TARGETS[name])
    atheris.Fuzz()


def write_corpus(names: list[str], folder: Path) -> list[str]:
    """Write valid inputs of each target and a dictionary of their words, from which libFuzzer makes new inputs."""
    sys.path.insert(0, str(TESTS))
    import hostile

    for name in names or list(hostile.TARGETS):
        if name not in hostile.TARGETS:
            raise SystemExit(f"{name}: no target; there are {', '.join(hostile.TARGETS)}")
        corpus = folder / name
        corpus.mkdir(parents=True)
        for number, seed in enumerate(hostile.SEEDS[name]):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = {word for seed in hostile.SEEDS[name] for word in re.findall(rb"[A-Za-z0-9_.-]{2,40}", seed)}
        lines = [f'"{word.decode()}"' for word in sorted(words)]
        (folder / f"{name}.dict").write_text(
            "\n".join([*lines, '"9223372036854775807"', '"1e308"', '"-1"', '"nan"'])
        )
    return names or list(hostile.TARGETS)


def measure(name: str, seconds: int, corpus: Path, crashes: Path) -> dict[str, object]:
    """Run one target in a process of its own and return a row of the table."""
    limits = [
        f"-max_total_time={seconds}", f"-timeout={SECONDS_PER_INPUT}", f"-report_slow_units={SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MEGABYTES + 2048}",
        "-max_len=8192", "-print_final_stats=1", f"-dict={corpus / name}.dict",
        f"-artifact_prefix={crashes}/{name}-",
    ]  # fmt: skip
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--", *limits, str(corpus / name)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    tried = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    crashed = sorted(path.name for path in crashes.glob(f"{name}-*"))
    if done.returncode and not crashed:
        crashed = [f"exit code {done.returncode}"]
    if crashed:
        print(done.stderr[-4000:], file=sys.stderr)
    return {
        "target": name,
        "inputs": int(tried.group(1)) if tried else 0,
        "coverage": int(covered[-1]) if covered else 0,
        "crashes": crashed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument(
        "--crashes", type=Path, default=Path("fuzz-crashes"), help="the folder for inputs that crash"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*")
    given = parser.parse_args()
    if given.child:
        fuzz(given.child, given.targets)
        return
    given.crashes.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as corpus:
        for name in write_corpus(given.targets, Path(corpus)):
            rows.append(measure(name, given.seconds, Path(corpus), given.crashes.resolve()))
            if not given.json:
                row = rows[-1]
                print(
                    f"{row['target']:<20}{row['inputs']:>12,}{row['coverage']:>8}  {row['crashes'] or 'none'}",
                    flush=True,
                )
    if given.json:
        print(json.dumps(rows))
    raise SystemExit(any(row["crashes"] for row in rows))


if __name__ == "__main__":
    main()
