"""The wheel, the sdist and a plain checkout hold the same package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "import mcore_reshard.planner.plan.make_plan as m, mcore_reshard.kernels.errors as e; print(m.__file__, e.__file__)"
)


def package_files(root: Path) -> set[str]:
    """The package's files in a checkout, by the names that they are installed under."""
    found = set()
    for top, prefix in (("mcore_reshard", ""), ("planner", "mcore_reshard/"), ("kernels", "mcore_reshard/")):
        for file in (root / top).rglob("*"):
            if (file.is_file() and file.suffix in {".py", ".json", ".cu", ".css", ".js"}) or file.name == "py.typed":
                found.add(prefix + str(file.relative_to(root)))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built out of it."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return out


def test_wheel_and_sdist_hold_the_files_of_the_checkout(built: Path) -> None:
    wheel = {name for name in zipfile.ZipFile(next(built.glob("*.whl"))).namelist() if ".dist-info/" not in name}
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    sdist = {name for name in names if name.startswith("mcore_reshard/")}
    assert wheel == sdist == package_files(ROOT)


def test_a_checkout_comes_before_an_installed_wheel(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    assert_imports_from(ROOT, [str(ROOT), str(tmp_path)])
    assert_imports_from(tmp_path, [str(tmp_path)])


def test_a_plain_checkout_imports_as_it_is() -> None:
    assert_imports_from(ROOT, [str(ROOT)])


def assert_imports_from(expected: Path, path: list[str]) -> None:
    """-S: no site packages, and so nothing that is installed; numpy is added by its own folder."""
    path = [*path, str(Path(np.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}; {IMPORTED}"
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert all(Path(file).is_relative_to(expected) for file in ran.stdout.split())
