"""Spec -> CUDA source: Jinja fills in constants, includes are joined, #line keeps numbers true.

Each template is rendered on its own and quoted includes are joined afterwards, once each, so an
include inside a false `//% if` is not joined. A process reads the templates once: an edit is seen
by the next process, and a cache key made from `digest()` belongs to what `source()` renders.

For the target "host", a C++ compiler, `host/x.cuh` takes the place of `x.cuh` where there is one.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .spec import AnySpec

if TYPE_CHECKING:
    import jinja2

SUFFIXES = (".cu", ".cuh", ".cpp")
TARGETS = ("cuda", "host")
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
LINE_STATEMENT = "//%"
JINJA = re.compile(r"\$\{|//%|/\*[%#]")

# Ends every template line while Jinja runs: MARK, file, MARK, line number. Not a character of C++.
MARK = "\x01"
MARKED = re.compile(f"^(.*?){MARK}([^{MARK}]*){MARK}([0-9]+)(.*)$")


class TemplateError(ValueError):
    """A template cannot be rendered; the message names its file, its line and what is wrong."""


def default_folder() -> Path:
    """The templates: inside the package (wheel) or beside it (checkout, editable install)."""
    package = Path(__file__).resolve().parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


@functools.cache
def templates(folder: Path | None = None) -> Mapping[str, str]:
    """Text of every template by its name relative to `folder`, with forward slashes; read once.

    Raises
    ------
    FileNotFoundError
        The folder is missing or holds no templates.
    """
    root = default_folder() if folder is None else folder
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    if not files:
        raise FileNotFoundError(
            f"no templates ({', '.join(SUFFIXES)}) in {root}; reinstall rtflash"
        )
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


@functools.cache
def digest(folder: Path | None = None, target: str = "cuda") -> str:
    """SHA-256 of a target's files; with a Spec's variables it stands for the rendered source."""
    others = tuple(f"{other}/" for other in TARGETS if other != target)
    files = [item for item in templates(folder).items() if not item[0].startswith(others)]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def source(spec: AnySpec, folder: Path | None = None, target: str = "cuda") -> str:
    """The whole source of a variant, without quoted includes.

    Parameters
    ----------
    spec : the variant.
    folder : templates folder; None = the installed one.
    target : "cuda", or "host" for a C++ compiler.

    Raises
    ------
    TemplateError
        A variable is undefined, Jinja's syntax is wrong, or an include is missing.
    """
    return join(spec.kernel_file, templates(folder), spec.variables(), target)


def join(
    name: str, texts: Mapping[str, str], variables: Mapping[str, object], target: str = "cuda"
) -> str:
    """Render template `name` and everything that it includes into one source.

    Parameters
    ----------
    name : the first file, a key of `texts`.
    texts : template texts by name.
    variables : what ${...} and `//% if` may use. "true", "false" and whole numbers become bool and
        int, so that `//% if softcap` means what it says; booleans are written as C++ spells them.
    target : one of TARGETS: templates in a folder of this name take the place of their namesakes.
    """
    environment = make_environment(tuple(texts.items()))
    values = {key: jinja_value(value) for key, value in variables.items()}
    joined: set[str] = set()
    out: list[str] = []
    # Where the compiler believes the next line to be; whether the last line ends in a backslash.
    believed: tuple[str, int] = ("", 0)
    continued = False

    def add(file: str) -> None:
        nonlocal believed, continued
        joined.add(file)
        for text, origin, number in rendered_lines(environment, file, values, texts[file]):
            include = None if continued else INCLUDE.match(text)
            if include:
                included = resolve(include[1], origin, number, texts, target)
                if included not in joined:
                    add(included)
                continue
            # Inside a continued macro a directive would become part of it: wait for its end.
            if believed != (origin, number) and not continued:
                out.append(f'#line {number} "{origin}"')
                believed = (origin, number)
            out.append("" if PRAGMA_ONCE.match(text) else text)
            believed = (believed[0], believed[1] + 1)
            continued = text.endswith("\\")

    add(name)
    return "\n".join(out) + "\n"


@functools.lru_cache(4)
def make_environment(texts: tuple[tuple[str, str], ...]) -> jinja2.Environment:
    """Jinja with delimiters that leave CUDA alone; its loader marks each line's file and number.

    It is made once, since it parses each template once: most of a rendering's time.
    """
    import jinja2

    held = dict(texts)

    def load(name: str) -> tuple[str, str, None]:
        if name not in held:
            raise jinja2.TemplateNotFound(name)
        return mark_lines(name, held[name]), name, None

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix=LINE_STATEMENT,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: str(value).lower() if isinstance(value, bool) else value,
        autoescape=False,
    )


def mark_lines(name: str, text: str) -> str:
    """`text` with its place at the end of each line but line statements, which leave no line."""
    return "\n".join(
        line if line.lstrip().startswith(LINE_STATEMENT) else f"{line}{MARK}{name}{MARK}{number}"
        for line, _, number in plain_lines(name, text)
    )


def plain_lines(name: str, text: str) -> Iterator[tuple[str, str, int]]:
    """What `rendered_lines` gives for a template without Jinja."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield line.rstrip(), name, number


def rendered_lines(
    environment: jinja2.Environment, name: str, values: Mapping[str, object], text: str
) -> Iterator[tuple[str, str, int]]:
    """(text, template, line number) of each line of template `name`, rendered."""
    import jinja2

    if JINJA.search(text) is None:
        yield from plain_lines(name, text)
        return
    try:
        text = environment.get_template(name).render(values)
    except jinja2.TemplateSyntaxError as error:
        place = f"{error.name or name}:{error.lineno}"
        raise TemplateError(f"{place}: {str(error.message).replace(MARK, ' ')}") from None
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"{name}: no template {error.name!r} to include") from None
    except jinja2.UndefinedError as error:
        place = f"{name}:{undefined_line(error, name)}"
        known = ", ".join(sorted(values))
        raise TemplateError(f"{place}: {error.message}; the variables are {known}") from None
    for line in text.split("\n"):
        marked = MARKED.match(line)
        if marked:
            before, origin, number, after = marked.groups()
            yield before + after, origin, int(number)


def undefined_line(error: BaseException, name: str) -> int:
    """The line at which rendering failed: Jinja gives its frames the template's name and lines."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def resolve(
    include: str, origin: str, number: int, texts: Mapping[str, str], target: str = "cuda"
) -> str:
    """The template that an include names, seen from the including file's folder, else the root."""
    for base in (posixpath.dirname(origin), ""):
        name = posixpath.normpath(posixpath.join(base, include))
        if name in texts:
            return f"{target}/{name}" if f"{target}/{name}" in texts else name
    raise TemplateError(f'{origin}:{number}: no template for #include "{include}"')


def jinja_value(value: object) -> object:
    """Text as the bool or int that it spells; anything else as it is."""
    if value in ("true", "false"):
        return value == "true"
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    return value
