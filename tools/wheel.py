"""A bundle as a wheel of its own: a package of no code, which rtflash finds by its name once it is installed.

By the format of pure wheels: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from pathlib import Path

import rtflash
from rtflash import bundle

NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


def build(name: str, kernels: bytes, summary: str) -> tuple[str, bytes]:
    """File name and bytes of the wheel of the package rtflash_bundle_`name`; a bundle's bytes decide them.

    Its version is rtflash's with the kernels' digest as the local part: pip leaves an installed wheel where the version
    is the same. The k keeps a part of mere digits from being read as a number, whose zeros in front go.
    """
    ours = rtflash.__version__
    package, version = (
        f"{bundle.PACKAGE}{name}",
        f"{ours}+k{hashlib.sha256(kernels).hexdigest()[:12]}",
    )
    info = f"{package}-{version}.dist-info"
    files = {
        f"{package}/__init__.py": f'"""{summary}"""\n'.encode(),
        f"{package}/{bundle.PACKAGED}": kernels,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\nSummary: {summary}\n"
            f"Requires-Python: >=3.10\nRequires-Dist: rtflash=={ours}\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: rtflash {ours}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ).encode(),
    }
    record = [f"{path},sha256={digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, bundle.TIMESTAMP)
            entry.external_attr = 0o644 << 16
            kind = zipfile.ZIP_STORED if data is kernels else zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, kind)
    return f"{package}-{version}-py3-none-any.whl", made.getvalue()


def digest(data: bytes) -> str:
    """SHA-256 as RECORD has it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write(folder: Path, name: str, kernels: bytes, summary: str) -> Path:
    """Put the wheel into a folder; its path."""
    file, data = build(name, kernels, summary)
    bundle.write(folder / file, data)
    return folder / file
