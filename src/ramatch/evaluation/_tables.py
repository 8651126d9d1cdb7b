"""Numbers in rows and columns, for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1, markdown: bool = False) -> str:
    """The first `names` columns are text and stand to the left, the others are numbers and stand to the right."""
    if markdown:
        align = [":---" if j < names else "---:" for j in range(len(head))]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in (head, align, *rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
    widths = [max(len(line[j]) for line in (head, *rows)) for j in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if j < names else c.rjust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (head, *rows)
    ]
    return "\n".join(line.rstrip() for line in (lines[0], "-" * len(lines[0]), *lines[1:]))
