"""``odyssey patch``: puts Odyssey's few lines into a Megatron-LM checkout, and takes them out byte for byte.

A patched checkout runs under launchers that know nothing of Odyssey. Data says what is put where: ``patches/`` has a
folder for each supported tag, which lists the files, and in each the line (anchor) beside which our lines stand. These
are enclosed in two marks, of which the first has a digest of them, so that edits by others are noticed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Parser
from odyssey_megatron.upstream.source import VERSIONED, Source

_BEGIN, _END = b"# >>> odyssey-megatron ", b"# <<< odyssey-megatron"
_NO_EDIT = "Start the job with 'odyssey run': that needs no patch."


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """The lines that are inserted into one file."""

    file: str
    anchor: str
    """The line of the file beside which ours are inserted; it must occur once."""
    after: bool
    """Whether ours stand after the anchor, and not before it."""
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The insertions for one tag of Megatron-LM."""

    tag: str
    version: str
    insertions: tuple[Insertion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file before and after."""

    path: Path
    name: str
    before: bytes
    after: bytes


def supported() -> tuple[Patch, ...]:
    """Return the patches in :func:`data`, in the order of their tags."""
    folder = data()
    ours = (folder / "lines.txt").read_text()
    patches = []
    for file in sorted(folder.glob("*/patch.toml")):
        table = tomllib.loads(file.read_text())
        insertions = tuple(
            Insertion(
                file=one["file"],
                anchor=one["after" if "after" in one else "before"],
                after="after" in one,
                lines=tuple(ours.replace("CALL", one["call"]).splitlines()),
            )
            for one in table["insert"]
        )
        patches.append(Patch(tag=file.parent.name, version=table["version"], insertions=insertions))
    return tuple(patches)


def data() -> Path:
    """Return the folder that has a subfolder for each supported tag."""
    package = Path(__file__).parent
    return next(one for one in (package / "patches", package.parent / "patches") if one.is_dir())


def install(checkout: Path) -> tuple[FileChange, ...]:
    """Return the changes that installing would make: none if all is installed. Raises ConfigError."""
    changes = []
    for insertion in _patch_for(checkout).insertions:
        before = _read(checkout, insertion.file)
        after = _insert(_remove(before, insertion.file), insertion)
        changes.append(_change(checkout, insertion.file, before, after))
    return _changed(changes)


def uninstall(checkout: Path) -> tuple[FileChange, ...]:
    """Return the changes that uninstalling would make, whatever tag the lines are for. Raises ConfigError."""
    changes = []
    for name in _files():
        before = _read(checkout, name)
        changes.append(_change(checkout, name, before, _remove(before, name)))
    return _changed(changes)


def status(checkout: Path) -> list[str]:
    """Return a line of text about the checkout, and one about each file that patches are for. Raises ConfigError."""
    version = _version(checkout)
    patch = next((one for one in supported() if one.version == version), None)
    known = f" ({patch.tag})" if patch else ", for which there is no patch"
    lines = [f"{checkout}: megatron-core {version or 'of a version that cannot be read'}{known}"]
    insertions = {one.file: one for one in patch.insertions} if patch else {}
    lines += [f"  {name}: {_state(_read(checkout, name), name, insertions.get(name))}" for name in _files()]
    return lines


def marked(checkout: Path) -> list[str]:
    """Return the files that have marks of Odyssey's, whatever version the checkout is of. Raises ConfigError."""
    there = (name for name in _files() if (checkout / name).is_file())
    return [name for name in there if any(_marks(_read(checkout, name).splitlines()))]


def write(changes: Sequence[FileChange]) -> None:
    """Carry out all changes or none. Raises ConfigError."""
    ready: list[tuple[FileChange, str]] = []
    done: list[FileChange] = []
    try:
        ready += ((change, _write_beside(change.path, change.after)) for change in changes)
        for change, temporary in ready:
            os.replace(temporary, change.path)
            done.append(change)
    except OSError as error:
        for change in done:
            os.replace(_write_beside(change.path, change.before), change.path)
        raise ConfigError(f"cannot write ({error}); nothing was changed. {_NO_EDIT}") from error
    finally:
        for _, temporary in ready[len(done) :]:
            os.unlink(temporary)


def diff(changes: Sequence[FileChange]) -> bytes:
    """Return the changes as a diff that ``git apply`` takes."""
    return b"".join(row for change in changes for row in _diff(change))


def main(argv: Sequence[str]) -> int:
    """Run ``odyssey patch`` and return its exit code. Raises ConfigError."""
    parser = Parser(prog="odyssey patch", description="Odyssey's lines in a Megatron-LM checkout.")
    parser.add_argument("action", choices=("install", "uninstall", "status"))
    parser.add_argument("checkout", type=Path, metavar="PATH", help="the Megatron-LM checkout")
    parser.add_argument("--dry-run", action="store_true", help="print the difference, change nothing")
    args = parser.parse_args(argv)
    if args.action == "status":
        print("\n".join(status(args.checkout)))
        return 0
    changes = (install if args.action == "install" else uninstall)(args.checkout)
    if not changes:
        already = "already" if args.action == "install" else "not"
        # What reads a difference gets an empty one.
        into = sys.stderr if args.dry_run else sys.stdout
        print(f"nothing to do: {already} installed in {args.checkout}", file=into)
    elif args.dry_run:
        sys.stdout.buffer.write(diff(changes))
    else:
        write(changes)
        for change in changes:
            print(f"{args.action}ed: {change.path}")
    return 0


def _files() -> list[str]:
    """Return the files that any patch is for."""
    return sorted({one.file for patch in supported() for one in patch.insertions})


def _state(text: bytes, name: str, insertion: Insertion | None) -> str:
    """Return in words whether Odyssey's lines are in ``text``. ``insertion``: those of its version, if there are any.

    Raises ConfigError if our lines were edited.
    """
    original = _remove(text, name)
    if insertion is None:
        return "not installed" if original == text else "installed; 'odyssey patch uninstall' takes it out"
    try:
        complete = _insert(original, insertion)
    except ConfigError as error:
        return f"{'not ' * (original == text)}installed; {error}"
    return {original: "not installed", complete: "installed"}.get(text, "installed by another version")


def _version(checkout: Path) -> str | None:
    """Return the version of ``checkout``; None: it cannot be read. Raises ConfigError if there is no checkout."""
    source = Source((checkout,))
    if source.file_of(VERSIONED) is None:
        raise ConfigError(
            f"{checkout} is no Megatron-LM checkout: megatron/core/package_info.py was expected, and is not there. "
            "Name the folder that has pretrain_gpt.py in it."
        )
    return source.version()


def _patch_for(checkout: Path) -> Patch:
    version, patches = _version(checkout), supported()
    if version is None:
        raise ConfigError(
            f"no version can be read from megatron/core/package_info.py in {checkout}: MAJOR, MINOR and PATCH must be "
            f"plain numbers there. {_NO_EDIT}"
        )
    for patch in patches:
        if patch.version == version:
            return patch
    known = ", ".join(f"{patch.version} ({patch.tag})" for patch in patches)
    raise ConfigError(
        f"{checkout} has megatron-core {version}, and there are patches for {known}. Check one of these out. {_NO_EDIT}"
    )


def _read(checkout: Path, name: str) -> bytes:
    try:
        return (checkout / name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{checkout / name} was expected and cannot be read ({error.strerror}); nothing was changed. {_NO_EDIT}"
        ) from error


def _insert(text: bytes, insertion: Insertion) -> bytes:
    """Return ``text`` with our lines in the file's own line endings; one that ends without still does."""
    rows = text.splitlines(keepends=True)
    conflicts = [number for number, row in enumerate(rows, 1) if row.startswith((b"<<<<<<< ", b">>>>>>> "))]
    if conflicts:
        raise ConfigError(
            f"{insertion.file} has a conflict that git left in lines {', '.join(map(str, conflicts))}. Nothing was "
            "changed; resolve it first."
        )
    places = [number for number, row in enumerate(rows) if _bare(row) == insertion.anchor.encode()]
    if len(places) != 1:
        numbers = ", ".join(str(place + 1) for place in places)
        raise ConfigError(
            f"{insertion.file} is not as its tag has it: expected the line {insertion.anchor!r} once, found it "
            + (f"in lines {numbers}" if places else f"nowhere in {len(rows)} lines")
            + f". Nothing was changed; put this line back as it was. {_NO_EDIT}"
        )
    (place,) = places
    endings = (row[len(_bare(row)) :] for row in (rows[place], rows[0]))
    ending = next(filter(None, endings), b"\n")
    block = [line + ending for line in _block(insertion.lines)]
    if insertion.after:
        if rows[place] == _bare(rows[place]):  # the end of a file without a line ending
            rows[place] += ending
            block[-1] = _bare(block[-1])
        place += 1
    return b"".join([*rows[:place], *block, *rows[place:]])


def _remove(text: bytes, name: str) -> bytes:
    """Return ``text`` without our marks and the lines between them. Raises ConfigError if these were edited."""
    rows = text.splitlines(keepends=True)
    begin, end = _marks(rows)
    if not begin and not end:
        return text
    if len(begin) == len(end) == 1 and begin < end:
        first, last = begin[0], end[0] + 1
        found = [_bare(row) for row in rows[first:last]]
        if found == _block([line.decode(errors="replace") for line in found[1:-1]]):
            before = rows[:first]
            if before and rows[last - 1] == _bare(rows[last - 1]):
                before[-1] = _bare(before[-1])
            return b"".join(before + rows[last:])
    raise ConfigError(
        f"{name} has lines of Odyssey that were edited since: expected one block from {_BEGIN.decode()!r} to "
        f"{_END.decode()!r} with the contents of its digest, found marks in lines "
        f"{', '.join(str(number + 1) for number in sorted(begin + end))}. Nothing was changed; take the block out by "
        "hand, or restore the file (git checkout)."
    )


def _marks(rows: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows that our first and our last marks are in."""
    begin, end = (
        [number for number, row in enumerate(rows) if row.startswith(mark)] for mark in (_BEGIN, _END)
    )
    return begin, end


def _block(lines: Sequence[str]) -> list[bytes]:
    """Return our lines between their marks, without line endings."""
    contents = [line.encode() for line in lines]
    digest = hashlib.blake2b(b"\n".join(contents), digest_size=4).hexdigest()
    return [_BEGIN + f"{digest}: 'odyssey patch uninstall' takes this out".encode(), *contents, _END]


def _bare(row: bytes) -> bytes:
    return row.rstrip(b"\r\n")


def _change(checkout: Path, name: str, before: bytes, after: bytes) -> FileChange:
    return FileChange(path=(checkout / name).resolve(), name=name, before=before, after=after)


def _changed(changes: Sequence[FileChange]) -> tuple[FileChange, ...]:
    return tuple(change for change in changes if change.before != change.after)


def _write_beside(path: Path, text: bytes) -> str:
    """Write ``text`` to a new file next to ``path``, with the same mode, and with the same owner where this process may
    give it that; return its path. Raises OSError.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
            old, new = path.stat(), os.fstat(file.fileno())
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), old.st_mode & 0o7777)  # last, as a new owner takes set-user-ID bits away
    except OSError:
        os.unlink(temporary)
        raise
    return temporary


def _diff(change: FileChange) -> Iterator[bytes]:
    before, after = (text.splitlines(keepends=True) for text in (change.before, change.after))
    names = (f"a/{change.name}".encode(), f"b/{change.name}".encode())
    for row in difflib.diff_bytes(difflib.unified_diff, before, after, *names):
        yield row if row.endswith(b"\n") else row + b"\n\\ No newline at end of file\n"
