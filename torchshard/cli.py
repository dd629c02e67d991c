"""The command line: `torchshard COMMAND`, a thin shell over the functions of the same names.

Exit codes: 0 all right; 1 `diff` found a difference; 2 something the user can mend, said in a sentence on stderr; 130
interrupted; 141 what read the output has gone. Anything else is a bug.
A command is a function below; what it needs is imported when it runs, so that asking for help costs nothing.
"""

import gc
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from torchshard.errors import CheckpointError, TorchshardError

app = typer.Typer(
    name="torchshard",
    help="Data parallel, sharded tensors and checkpoint conversion for torch.distributed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. What the user can mend becomes a message on stderr and exit code 2."""
    gc.set_threshold(100_000)  # ten thousand entries are no garbage: looking for some takes a tenth of the time
    _replace_closed_streams()
    try:
        app()
    except TorchshardError as error:
        _note(error)
        sys.exit(2)


def _replace_closed_streams() -> None:
    """Open what was closed before the start, or the next file gets its number, and what is meant for the stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  for the life of the process


def _note(text: object) -> None:
    """Tell something on stderr. Where that fails, the work is done all the same."""
    with suppress(OSError):
        typer.echo(f"torchshard: {text}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from torchshard import __version__

        _print(f"torchshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of torchshard itself."""


class Format(StrEnum):
    """The formats that can be written."""

    torch = "torch"
    safetensors = "safetensors"
    dcp = "dcp"


_PATH_HELP = "A checkpoint folder or file, or a quoted pattern of the files of all ranks."
_CHOSEN = "Only keys that match this glob; may be given again."


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help=_PATH_HELP, show_default=False, readable=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Read all values: min, max, mean, NaN.")] = False,
    select: Annotated[list[str] | None, typer.Option(metavar="GLOB", help=_CHOSEN)] = None,
) -> None:
    """Show names, types, shapes, pieces and sizes of a checkpoint, without reading its tensors."""
    from torchshard import checkpoint

    with _warnings_on_stderr(), _bar(path.name, stats) as progress:
        found = checkpoint.inspect(path, stats=stats, select=select or (), progress=progress)
    _print(found.as_dict() if json else found)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_PATH_HELP, show_default=False, readable=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help=_PATH_HELP, show_default=False, readable=False)],
    rtol: Annotated[float, typer.Option(help="Relative tolerance of values.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Absolute tolerance; with both 0, bits are compared.")] = 0.0,
    values: Annotated[bool, typer.Option(help="Compare values, not only keys, types and shapes.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two checkpoints of any formats. Exit code 0: the same; 1: they differ; 2: an error."""
    from torchshard import checkpoint

    with _warnings_on_stderr(), _bar(f"{a.name}, {b.name}", values) as progress:
        found = checkpoint.diff(a, b, rtol=rtol, atol=atol, values=values, progress=progress)
    _print(found.as_dict() if json else found)
    if found:
        raise typer.Exit(1)


_NOT_READ = 128 + 13  # as of a program that SIGPIPE ends; 1 would say that checkpoints differ


def _print(found: object) -> None:
    if isinstance(found, dict):
        import json

        found = json.dumps(found, indent=2)
    try:
        typer.echo(str(found))
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(_NOT_READ) from error
        raise CheckpointError(f"The output cannot be written: {error.strerror or error}.") from error


@app.command()
def convert(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC... DST", help="What to read, and last what to write.", show_default=False, readable=False
        ),
    ],
    to: Annotated[Format, typer.Option("--to", help="What to write.", show_default=False)],
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for modules and buffers.")] = "64MiB",
    select: Annotated[list[str] | None, typer.Option(metavar="GLOB", help=_CHOSEN)] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Leave out keys that match this.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN=NEW", help=r"Rename keys: 'layers.(\d+)=blocks.\1'.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="[GLOB=]TYPE", help="Cast floating-point tensors to this type.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Write a folder of parts of this size with an index.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(metavar="NxM", help="Ranks that a dcp folder is cut for.")] = None,
    placements: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB=S(0),R", help="How tensors are cut on the mesh; may be given again."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Read the destination again and compare.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing destination.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier conversion was interrupted.")
    ] = False,
    fsync: Annotated[bool, typer.Option(help="Have the data on the disk before the destination appears.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
) -> None:
    """Write a checkpoint in another format, as a stream in bounded memory."""
    from torchshard import checkpoint
    from torchshard.checkpoint.text import parse_mesh, parse_pairs, parse_size
    from torchshard.keys import KeyRules
    from torchshard.keys import rename as renamed

    if len(paths) < 2:
        raise typer.BadParameter("a source and a destination are needed", param_hint="SRC... DST")
    *sources, dst = paths
    pairs = parse_pairs(rename or (), "--rename", r"layers.(\d+)=blocks.\1")
    rules = KeyRules([renamed(*pair) for pair in pairs.items()], strict="rules") if pairs else None
    with _warnings_on_stderr(), _bar(dst.name, not dry_run) as progress:
        done = checkpoint.convert(
            sources,
            dst,
            to=to.value,
            max_memory=parse_size(max_memory, "--max-memory"),
            select=select or (),
            exclude=exclude or (),
            rename=rules,
            dtype=parse_pairs(dtype or (), "--dtype", "*.weight=bfloat16", default="*"),
            shard_size=None if shard_size is None else parse_size(shard_size, "--shard-size"),
            mesh=None if mesh is None else parse_mesh(mesh, "--mesh"),
            placements=parse_pairs(placements or (), "--placements", "*.weight=S(0),R"),
            verify=verify,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            dry_run=dry_run,
            progress=progress,
        )
    if dry_run:
        _print(f"{done.table()}\n")
    _print(done)


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="Text to train on, a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results go.")] = Path("demo-output"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 250,
) -> None:
    """Train a small GPT on real text data parallel, save, convert, reload, and compare at every turn."""
    from torchshard.demo.launch import launch

    if code := launch(data, out, ranks, steps):
        raise typer.Exit(code)


def _time(value: float | None) -> float | None:
    """A time in whatever unit the option has."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"expected a finite time, 0 or more; got {value}")
    return value


def _speed(value: float) -> float:
    """A bandwidth in whatever unit; it may be infinite."""
    if not value > 0:
        raise typer.BadParameter(f"expected more than 0; got {value}")
    return value


def _written(path: Path | None) -> Path | None:
    """A file to be written later has a folder."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"expected a file in a folder that can be written to, got {path}")
    return path


def _drawn(path: Path | None) -> Path | None:
    """A picture can be drawn, too."""
    from torchshard.timeline import check_picture

    if path is not None:
        with _mistakes_on_stderr(ImportError):
            check_picture(path)
    return _written(path)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="package.module:function or file.py:function that makes it."),
    ],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="SIZES", help="An input: 8,128 or int64:8,128. Repeatable.")
    ] = None,
    bucket_cap_mb: Annotated[float | None, typer.Option(metavar="MIB", help="Size of buckets.")] = None,
    first_bucket_mb: Annotated[float | None, typer.Option(metavar="MIB", help="Size of the first one.")] = None,
    world_size: Annotated[int, typer.Option(metavar="N", help="Ranks of the simulated step.")] = 8,
    gbits: Annotated[
        float, typer.Option(metavar="GBIT/S", callback=_speed, help="Bandwidth of each rank's link.")
    ] = 100.0,
    latency: Annotated[float, typer.Option(metavar="US", callback=_time, help="Of a message, in microseconds.")] = 10.0,
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="ring or tree.")] = "ring",
    ranks_per_node: Annotated[int, typer.Option(metavar="N", help="Ranks of a node.")] = 1,
    inside_gbits: Annotated[
        float, typer.Option(metavar="GBIT/S", callback=_speed, help="Bandwidth inside of a node.")
    ] = 1000.0,
    forward: Annotated[
        float | None, typer.Option(metavar="MS", callback=_time, help="Time of forward; default: both are measured.")
    ] = None,
    backward: Annotated[float | None, typer.Option(metavar="MS", callback=_time, help="Time of backward.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            readable=False,
            writable=True,
            callback=_written,
            help="Write a Chrome trace of the step.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            readable=False,
            writable=True,
            callback=_drawn,
            help="Draw the step (.png, .svg, ...).",
        ),
    ] = None,
) -> None:
    """Show the bucket plan of a model, and a step with it on any number of ranks, simulated."""
    from torchshard.compiler import explain, measure, named
    from torchshard.simulation import Link, Network, StepTimes, simulate_step

    with _mistakes_on_stderr():
        if (forward is None) != (backward is None):
            raise ValueError("give --forward and --backward, or neither: then both are measured")
        times = None if forward is None or backward is None else StepTimes(forward / 1e3, backward / 1e3)
        inside = Link(inside_gbits * 1e9 / 8, latency / 1e6) if ranks_per_node > 1 else None
        link = Link(gbits * 1e9 / 8, latency / 1e6)
        network = Network(world_size, link, algorithm, ranks_per_node, inside)
        module, args = named.load(model, inputs or ())
        found = explain(module, *args, bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        times = times or measure(module, *args)
        if not found.buckets:
            raise ValueError(f"no gradient is reduced in a graph, so that there is no step to simulate\n{found}")
        step = simulate_step(found.buckets, network, times)
    _print(f"{found}\n\n{step}")
    with _mistakes_on_stderr(OSError):
        if trace:
            trace.write_text(step.chrome_trace())
        if picture:
            step.picture(picture, str(step.network))


@contextmanager
def _mistakes_on_stderr(*more: type[Exception]) -> Iterator[None]:
    """A value that makes no sense becomes a sentence on stderr and exit code 2; so do these other exceptions."""
    kinds: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _bar(name: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr; None where stderr is not a terminal, or there is nothing to wait for."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Python's warnings as plain sentences, once the work is done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        _note(warning.message)
