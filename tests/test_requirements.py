"""constraints.txt: its versions fit together, also with the CUDA build of torch that pip finds on
PyPI.
"""

from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LINES = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
PINS = {
    canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in LINES) if pin
}
# What the CUDA build of a version requires on PyPI; a CPU build requires neither, so nothing else
# here would notice.
CUDA_BUILDS = {
    "2.13.0": (
        "triton==3.7.1",
        "setuptools>=77.0.3",
        "networkx>=2.5.1",
        "sympy>=1.13.3",
        "fsspec>=0.8.5",
    )
}


def required_by(name: str) -> list[Requirement]:
    """The requirements of an installed package, without those of its extras; empty where it is not
    installed.
    """
    try:
        listed = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return []
    return [each for each in listed if each.marker is None or each.marker.evaluate({"extra": ""})]


def refused(requirements: list[Requirement]) -> list[str]:
    """Those that the pinned version does not meet."""
    pins = [(each, PINS.get(canonicalize_name(each.name))) for each in requirements]
    return [str(each) for each, pin in pins if pin is not None and pin not in each.specifier]


def test_pinned_versions_fit_the_cuda_build_of_torch() -> None:
    assert refused([Requirement(text) for text in CUDA_BUILDS[PINS["torch"]]]) == []


def test_pinned_versions_fit_together() -> None:
    assert {name: unmet for name in PINS if (unmet := refused(required_by(name)))} == {}


def test_pinned_versions_install_with_every_python_3_11() -> None:
    """Debian 12 has 3.11.2, and pip finds no version that a pin allows where that one needs 3.11.5."""
    assert [name for name in PINS if "3.11.0" not in SpecifierSet(python_of(name))] == []


def python_of(name: str) -> str:
    """The versions of Python that an installed package accepts; all where it is not installed or
    does not say.
    """
    try:
        return metadata(name).get("Requires-Python", "")
    except PackageNotFoundError:
        return ""
