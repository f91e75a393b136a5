"""Compile the libraries that stand in for NVIDIA's.

is_possible   whether this torch is a CUDA build and there are a compiler and CUDA's headers
build         the folder of the libraries, compiled where they are not there yet
"""

import hashlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
# Prefixes of the functions of NVIDIA's libraries for which stubs are made; the others are loaded as
# they are.
STUBBED = r"(?:__cuda|cuda|cublas|cudnn|cupti|nccl|cusolver)\w+"
PRELOADED = "libfake_cuda.so"
# What is loaded by these names while running: the driver, by Triton too, and the library that tells
# of NVLink.
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"


def is_possible() -> str:
    """Empty, or why the libraries cannot be built here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if missing := [tool for tool in ("g++", "nm") if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}"
    return "" if (_headers() / "cuda.h").exists() else f"{_headers()} has no headers of CUDA"


def build(folder: Path) -> Path:
    """Compile the libraries into a folder below `folder`, named by what they are made of; returns
    that folder.
    """
    sources = [SOURCES / "runtime.cpp", SOURCES / "nccl.cpp", Path(__file__)]
    digest = hashlib.sha256(
        torch.__version__.encode() + b"".join(source.read_bytes() for source in sources)
    )
    made = folder / f"fake-cuda-{digest.hexdigest()[:16]}"
    if (made / DRIVER).exists():
        return made
    made.mkdir(parents=True, exist_ok=True)
    objects = [_compiled(source, made) for source in sources[:2]]
    stubs = _compiled(_stubs(made / "stubs.cpp", _imported() - _defined(objects)), made)
    _link(made / PRELOADED, *objects, stubs)
    _link(made / MANAGEMENT, _compiled(_stubs(made / "management.cpp", _management()), made))
    _link(made / DRIVER, *objects, stubs)
    (made / "libcuda.so").symlink_to(DRIVER)  # by which Triton links
    return made


def _headers() -> Path:
    major = (torch.version.cuda or "").split(".")[0]
    return Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}" / "include"


def _libraries() -> list[Path]:
    return sorted((Path(torch.__file__).parent / "lib").glob("*.so"))


def _imported() -> set[str]:
    """The functions that torch's libraries import from NVIDIA's, and all of the driver's, which are
    found by name.
    """
    names = {name for library in _libraries() for name in _symbols(library, "U")}
    header = (_headers() / "cuda.h").read_text()
    driver = re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header) + re.findall(
        r"#define\s+cu\w+\s+(cu\w+_v\d)\b", header
    )
    return {name for name in names if re.fullmatch(STUBBED, name)}.union(driver)


def _defined(objects: Iterable[Path]) -> set[str]:
    return {name for path in objects for name in _symbols(path, "T")}


def _symbols(library: Path, kind: str) -> list[str]:
    dynamic = ["-D"] if library.suffix == ".so" else []
    listed = subprocess.run(
        ["nm", *dynamic, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(rf" {kind} (\w+)", listed)


def _management() -> set[str]:
    """The functions of NVIDIA's management library, which torch looks up by name."""
    found = re.findall(
        rb"\0(nvml[A-Z]\w+)\0", (Path(torch.__file__).parent / "lib/libc10_cuda.so").read_bytes()
    )
    return {name.decode() for name in found}


def _stubs(source: Path, names: Iterable[str]) -> Path:
    """Write functions that return success, whatever their arguments, or the version that torch was
    compiled with.
    """
    major, minor, patch = torch._C._cudnn.getCompileVersion()
    values = {"cudnnGetVersion": 10_000 * major + 100 * minor + patch}
    lines = (
        f'extern "C" long {name}() {{ return {values.get(name, 0)}; }}\n' for name in sorted(names)
    )
    source.write_text("".join(lines))
    return source


def _compiled(source: Path, folder: Path) -> Path:
    compiled = folder / f"{source.stem}.o"
    includes = [f"-I{path}" for path in (_headers(), SOURCES / "include")]
    subprocess.run(
        ["g++", "-O1", "-fPIC", "-w", *includes, "-c", source, "-o", compiled], check=True
    )
    return compiled


def _link(library: Path, *objects: Path) -> None:
    soname = f"-Wl,-soname,{library.name}"
    subprocess.run(["g++", "-shared", soname, "-o", library, *objects, "-ldl"], check=True)
