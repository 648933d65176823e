"""`schemas` and `streams` are generic import names: a foreign module there is named at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["schemas", "streams"])
def test_a_foreign_module_of_the_same_name_is_refused_clearly(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("ANSWER = 42\n")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import polar"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"the module '{name}' at {tmp_path / name}.py is not polar's own" in done.stderr


def test_polar_itself_imports() -> None:
    done = subprocess.run([sys.executable, "-c", "import polar"], cwd=ROOT, check=False)
    assert done.returncode == 0
