"""`halfbyte report RUN [OTHER_RUN]`."""

from typing import Annotated, Any

import typer


def report(
    run: Annotated[str, typer.Argument(help="The output_dir of a run.")],
    other: Annotated[str | None, typer.Argument(help="Another run, to lay over it.")] = None,
    out: Annotated[
        str | None, typer.Option(help="The file to write. Default: RUN/report.html, RUN/compared.html for two.")
    ] = None,
    merged: Annotated[
        list[str] | None,
        typer.Option(help="A folder that `halfbyte merge` wrote from the run's adapter; once for each run."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it anew while the run goes on.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Seconds between two looks of --watch.")] = 10,
) -> None:
    """Write what a run recorded as one HTML file."""
    from halfbyte.report import watch as watch_runs
    from halfbyte.report import write_report

    def write() -> Any:
        return write_report(run, other, out=out, merged=merged or (), reload_s=every if watch else None)

    path, runs = write()
    print(f"report: {path}", flush=True)
    if watch and not all(each.finished for each in runs):
        watch_runs(write, every)
        print("the run has ended; the report is complete")
