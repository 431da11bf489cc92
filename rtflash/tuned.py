"""Tiles that `rtflash tune` found on this machine's GPUs; for the calls that they were measured for they come first.

They stand in `tuned.json` in the cache folder, one for each GPU, table, dtype, pair of head_dims and mask. What another
rtflash wrote, or no kernel could be made with, is not used.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import bundle, cache, settings
from .device import Device
from .spec import Spec
from .tiles import FEW, HOPPER, SOME, TILES, Table, Tile

FILE = "tuned.json"
NAMES = {"many": TILES, "few": FEW, "some": SOME, "hopper": HOPPER}


class Key(NamedTuple):
    """What a tile was measured for.

    Attributes
    ----------
    gpu, arch : the product and its architecture.
    table : whose tile it takes the place of, one of NAMES.
    dtype, head_dim, head_dim_v, mask : as in Spec.
    """

    gpu: str
    arch: str
    table: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str


_forced: dict[str, Tile | None] = {}  # by table; None: its own


def tile(
    table: Table, device: Device, dtype: str, head_dim: int, head_dim_v: int, mask: str
) -> Tile | None:
    """The tile that was found best for such calls on a GPU of this name, None where none was."""
    if not _forced and not used():
        return None
    name = next((name for name, known in NAMES.items() if known is table), "")
    if name in _forced:
        return _forced[name]
    found = used().get(Key(device.name, device.arch, name, dtype, head_dim, head_dim_v, mask))
    if found is not None and (
        spec_of(name, device.major, dtype, head_dim, head_dim_v, mask, found).shared_bytes
        > device.shared_bytes_per_block
    ):
        return None
    return found


@contextlib.contextmanager
def forced(tiles: Mapping[str, Tile | None]) -> Iterator[None]:
    """Within, calls that one of these tables serves take its tile; not those with prescaled scores or short loads."""
    kept = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(kept)


def ignored() -> contextlib.AbstractContextManager[None]:
    """Within, calls take the tables' tiles."""
    return forced(dict.fromkeys(NAMES))


def spec_of(
    table: str, major: int, dtype: str, head_dim: int, head_dim_v: int, mask: str, tile: Tile
) -> Spec:
    """A variant with the tile; ValueError where there can be none."""
    packed = table in ("few", "some")
    isa = 90 if table == "hopper" else 80 if major >= 8 else 75
    return Spec(dtype, head_dim, head_dim_v, isa=isa, mask=mask, pack_gqa=packed, **tile._asdict())


def file() -> Path:
    """Where the tiles stand."""
    return settings.cache_dir() / FILE


@functools.cache
def used() -> Mapping[Key, Tile]:
    """The tiles in use. A process reads them, and whether to use them, once, and again after `store`."""
    return tiles(file()) if settings.tuned() else {}


def tiles(path: Path) -> Mapping[Key, Tile]:
    """The tiles of a file that this rtflash can use; of a missing file none."""
    return read(path, rows(path))[0]


def read(path: Path, held: Iterable[Any]) -> tuple[dict[Key, Tile], list[Exception]]:
    """The tiles of those rows of a file that are this rtflash's, and what is wrong with others of them."""
    found: dict[Key, Tile] = {}
    errors: list[Exception] = []
    for row in held:
        try:
            if not isinstance(row, dict):
                raise TypeError(f"{row!r} is no row")
            if is_ours(row):
                found[read_row(row)] = Tile(**row["tile"])
        except (KeyError, TypeError, ValueError) as error:
            cache.warn_once("tuned", f"rtflash: {path} holds a tile that cannot be ({error})")
            errors.append(error)
    return found, errors


def is_ours(row: Any) -> bool:
    """Whether this rtflash wrote a row."""
    return (
        isinstance(row, dict) and {name: row.get(name) for name in bundle.maker()} == bundle.maker()
    )


def read_row(row: Mapping[str, Any]) -> Key:
    """What a row's tile was measured for; KeyError, TypeError or ValueError if the row is wrong."""
    key, fields = Key(**{name: row[name] for name in Key._fields}), row["tile"]
    for values, kind in ((key, Key), (Tile(**fields), Tile)):
        for name, value in zip(kind._fields, values, strict=True):
            wanted = kind.__annotations__[name]
            if type(value).__name__ != getattr(wanted, "__forward_arg__", wanted):
                raise TypeError(f"{name} is {value!r}")
    if key.table not in NAMES:
        raise ValueError(f"table is {key.table!r}")
    major = int(key.arch.removeprefix("sm_").removesuffix("a")) // 10
    spec_of(key.table, major, *key[3:], Tile(**fields))
    return key


def rows(path: Path) -> list[Any]:
    """The rows of a file as they stand there, damaged ones too; none where it holds something else."""
    try:
        held = json.loads(path.read_bytes())["rows"]
        if isinstance(held, list):
            return held
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    cache.warn_once("tuned", f"rtflash: {path} holds no tiles of `rtflash tune`, and is not used")
    return []


def store(measured: Iterable[tuple[Key, Tile | None, Mapping[str, object]]]) -> Path:
    """Put tiles, and what else is known of them, in the place of earlier ones for the same calls; None: no tile.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path, new = file(), {key: (found, figures) for key, found, figures in measured}
    replaced = [list(key) for key in new]  # compared, not looked up: a damaged row may hold a list
    path.parent.mkdir(parents=True, exist_ok=True)
    with cache.locked(path):
        kept = [
            row
            for row in rows(path)
            if not is_ours(row) or [row.get(name) for name in Key._fields] not in replaced
        ]
        added = [
            {**key._asdict(), "tile": found._asdict(), **figures, **bundle.maker()}
            for key, (found, figures) in new.items()
            if found is not None
        ]
        lines = ",\n  ".join(json.dumps(row) for row in [*kept, *added])
        bundle.write(path, f'{{"rows": [\n  {lines}\n]}}\n'.encode())
    used.cache_clear()
    return path


def said() -> str:
    """Which tiles are in use, in words."""
    path = file()
    held = rows(path)
    if not held:
        return "none: `rtflash tune` finds them"
    found, errors = read(path, held)
    gpus = ", ".join(sorted({key.gpu for key in found}))
    others = sum(isinstance(row, dict) and not is_ours(row) for row in held)
    parts = [f"{len(found)} tile{'' if len(found) == 1 else 's'} for {gpus or 'no GPU'} in {path}"]
    if others:
        parts.append(f"{others} of another rtflash, not used: run `rtflash tune` again")
    if errors:
        parts.append(f"{len(errors)} damaged, not used: run `rtflash tune` again")
    if not settings.tuned():
        parts.append("all ignored (RTFLASH_TUNED=0)")
    return "; ".join(parts)
