"""The files of the project: what is tracked, or would be if it were added."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BUILT = {".git", ".venv", "build", "dist", "polar-data", ".polar-cache"}


@cache
def project_files() -> tuple[Path, ...]:
    """Paths relative to the root. Without git (an unpacked archive), everything not built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = {Path(name) for name in listed.stdout.split("\0") if name}
    else:
        names = {path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()}
        names = {name for name in names if not _BUILT & set(name.parts) and "__pycache__" not in name.parts}
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


@cache
def text_of(name: Path) -> str:
    """Content of a file; empty for one that is no UTF-8 text."""
    try:
        return (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def python_files(*top: str) -> list[Path]:
    """Python files below these top-level folders; all of them when none is named."""
    return [name for name in project_files() if name.suffix == ".py" and (not top or name.parts[0] in top)]
