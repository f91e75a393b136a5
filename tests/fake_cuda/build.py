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
# Prefixes of the functions of NVIDIA's libraries for which stubs are made; the others are loaded as they are.
STUBBED = r"(?:__cuda|cuda|cublas|cudnn|nccl|cusolver)\w+"
PRELOADED = "libfake_cuda.so"
# What is loaded by these names while running: the driver, by Triton too, and the library that tells of NVLink.
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"


def is_possible() -> str:
    """Empty, or why the libraries cannot be built here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if missing := [tool for tool in ("g++", "nm") if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}"
    return "" if (_headers() / "cuda.h").exists() else f"{_headers()} has no headers of CUDA"


def build(folder: Path) -> Path:
    """Compile the libraries into a folder below `folder`, named by what they are made of; returns that folder."""
    sources = [SOURCES / "runtime.cpp", SOURCES / "nccl.cpp", Path(__file__)]
    digest = hashlib.sha256(torch.__version__.encode() + b"".join(source.read_bytes() for source in sources))
    made = folder / f"fake-cuda-{digest.hexdigest()[:16]}"
    if (made / DRIVER).exists():
        return made
    made.mkdir(parents=True, exist_ok=True)
    compile_ = ["g++", "-O1", "-fPIC", "-w", f"-I{_headers()}", f"-I{SOURCES / 'include'}", "-c"]
    objects = []
    for source in sources[:2]:
        objects.append(str(made / f"{source.stem}.o"))
        subprocess.run([*compile_, str(source), "-o", objects[-1]], check=True)
    stubs = made / "stubs.c"
    stubs.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in sorted(_imported() - _defined(objects))))
    _link(made / PRELOADED, [*objects, str(stubs)])
    _link(made / MANAGEMENT, [_stub_file(made, _found_by_name("nvml"))])
    _link(made / DRIVER, [*objects, str(stubs)])
    (made / "libcuda.so").symlink_to(DRIVER)  # by which Triton links
    return made


def _headers() -> Path:
    major = (torch.version.cuda or "").split(".")[0]
    return Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}" / "include"


def _libraries() -> list[Path]:
    return sorted((Path(torch.__file__).parent / "lib").glob("*.so"))


def _imported() -> set[str]:
    """The functions that torch's libraries import from NVIDIA's, and all of the driver's, which are found by name."""
    names = {name for library in _libraries() for name in _symbols(library, "U")}
    header = (_headers() / "cuda.h").read_text()
    driver = re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header) + re.findall(
        r"#define\s+cu\w+\s+(cu\w+_v\d)\b", header
    )
    return {name for name in names if re.fullmatch(STUBBED, name)}.union(driver)


def _defined(objects: Iterable[str]) -> set[str]:
    return {name for path in objects for name in _symbols(Path(path), "T")}


def _symbols(library: Path, kind: str) -> list[str]:
    dynamic = ["-D"] if library.suffix == ".so" else []
    listed = subprocess.run(["nm", *dynamic, str(library)], check=True, capture_output=True, text=True).stdout
    return re.findall(rf" {kind} (\w+)", listed)


def _found_by_name(prefix: str) -> list[str]:
    """Names in torch's libraries that it looks up while running."""
    texts = (library.read_bytes() for library in _libraries() if library.name == "libc10_cuda.so")
    return sorted(
        {name.decode() for text in texts for name in re.findall(rb"\0(%s[A-Z]\w+)\0" % prefix.encode(), text)}
    )


def _stub_file(folder: Path, names: Iterable[str]) -> str:
    path = folder / "management.c"
    path.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in names))
    return str(path)


def _link(library: Path, inputs: list[str]) -> None:
    soname = f"-Wl,-soname,{library.name}"
    subprocess.run(["g++", "-shared", "-fPIC", "-w", soname, "-o", str(library), *_as_c(inputs), "-ldl"], check=True)


def _as_c(inputs: Iterable[str]) -> list[str]:
    return [part for path in inputs for part in ((["-x", "c"] if path.endswith(".c") else []) + [path, "-x", "none"])]
