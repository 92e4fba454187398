"""The wheel in a clean environment, as a user without rights: all that a node needs is in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import kakeya
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
DEPENDENCIES = Path(find_spec("grpc").origin).parents[1]  # type: ignore[union-attr,arg-type]
"""The packages that the wheel asks for; they are not installed again."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
AS_USER = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
pytestmark = pytest.mark.slow


def python_of_the_user() -> str:
    """One of this version that the user may run: a root's own Python may lie in its home."""
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/python{VERSION}"):
        try:
            subprocess.run([candidate, "-c", "import ensurepip"], check=True, cwd="/", **AS_USER)
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip(f"the user {AS_USER.get('user')} can run no Python {VERSION} of this machine")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that others may enter, as those of pytest may not be."""
    made = Path(tempfile.mkdtemp(prefix="kakeya-wheel-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="the extra test of this commit is not installed")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "-w", str(folder), str(ROOT)], check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_the_page_the_models_and_the_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for part in ("gateway/dashboard/static", "models", "v1")
        for path in (ROOT / "kakeya" / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"kakeya/py.typed", "kakeya/__main__.py"} | wanted <= names
    assert {name.partition("/")[0] for name in names} == {
        "kakeya",
        f"kakeya-{kakeya.__version__}.dist-info",
    }
    assert not [name for name in names if "__pycache__" in name]


def test_a_node_from_the_wheel_serves_the_page_and_a_model(wheel: Path, folder: Path) -> None:
    home = folder / "home"
    home.mkdir()
    home.chmod(0o777)
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}

    def run(*command: object) -> str:
        done = subprocess.run(
            [*map(str, command)],
            check=False,
            capture_output=True,
            text=True,
            env=environ,
            cwd=home,
            **AS_USER,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    venv = home / "venv"
    run(python_of_the_user(), "-m", "venv", venv)
    run(venv / "bin/pip", "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    python = venv / "bin/python"
    assert run(python, "-c", "import kakeya; print(kakeya.__file__)").startswith(str(site))
    assert kakeya.__version__ in run(venv / "bin/kakeya", "version")
    assert kakeya.__version__ in run(python, "-m", "kakeya", "version")

    flags = ("--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(
            [str(venv / "bin/kakeya-node"), *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            cwd=home,
            **AS_USER,
        ) as node,
    ):
        try:
            assert node.stdout is not None
            ready = re.search(r"http=(\S+)", node.stdout.readline())
            assert ready is not None, (home / "log").read_text()
            wants = Request(f"http://{ready[1]}/", headers={"accept": "text/html"})
            with urlopen(wants) as page:
                text = page.read().decode()
            files = set(re.findall(r"/?page/([\w.-]+)", text))
            assert {"page.css", "page.js"} <= files
            for file in files:
                with urlopen(f"http://{ready[1]}/page/{file}") as found:
                    assert found.read()
            assert run(venv / "bin/kakeya", "generate", "--max-tokens", "4", "--prompt", "class A")
        finally:
            node.terminate()
            wait_until("the node ends", lambda: node.poll() is not None)
    assert node.returncode == 0


@pytest.mark.skipif(shutil.which("ruby") is None, reason="ruby is not installed")
def test_the_formula_is_ruby() -> None:
    checked = subprocess.run(["ruby", "-c", str(ROOT / "launch/kakeya.rb")], check=False)
    assert checked.returncode == 0
