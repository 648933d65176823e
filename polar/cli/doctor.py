"""`polar doctor`: what is missing for which part, and what to type."""

import json
import sys
from typing import Annotated

import typer

from polar.cli.exits import Exit

Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]


def doctor(as_json: Json = False) -> int:
    """Check this machine part by part. Exit status 3 when a part of the one-machine loop is missing."""
    from dataclasses import asdict

    from polar.cli.diagnosis import diagnose

    findings = diagnose()
    missing = [finding for finding in findings if finding.status == "missing" and finding.needed]
    if as_json:
        sys.stdout.write(
            json.dumps({"ok": not missing, "findings": [asdict(finding) for finding in findings]}) + "\n"
        )
    else:
        from rich.console import Console
        from rich.table import Table

        marks = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "optional": "[yellow]not there[/]"}
        table = Table("", "part", "found", "what to type", title="polar doctor", title_justify="left")
        for finding in findings:
            table.add_row(marks[finding.status], finding.part, finding.found, finding.remedy)
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    return Exit.MISSING if missing else Exit.OK
