"""The page on a privacy look: figures, rows of images, and what they do not say."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from fewer.audit import AttackImages, Audit
from fewer.audit.summary import HEADS, LIMITS, MEANING, figure_rows
from fewer.report.files import write_files
from fewer.report.html import Picture, document, figure_of, note_of, table
from fewer.report.pictures import rows_picture

PAGE, FIGURES = "audit.html", "audit.json"


def write_audit(found: Audit, out: Path) -> list[Path]:
    """Write the page, the pictures and all figures into `out`; their paths, the page's first."""
    pictures = [picture(sheet) for sheet in found.sheets]
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds} rounds"
    title = f"Privacy look: {found.method} on {found.data} after {rounds}"
    who = ", ".join(map(str, found.clients))
    about = f"Samples of {len(found.clients)} clients: {who}. {LIMITS} Settings hash of the run: {found.hash}."
    body = [
        table(HEADS, figure_rows(found)),
        f'<p class="small">{MEANING}</p>',
        *map(note_of, found.notes),
        f'<div class="pictures">{"".join(map(figure_of, pictures))}</div>',
        f'<p class="small">{escape(about)}</p>',
    ]
    page = document(title, body).encode()
    return write_files(
        out,
        {
            PAGE: page,
            FIGURES: (json.dumps(found.as_json(), indent=1) + "\n").encode(),
            **{f"{each.name}.png": each.png for each in pictures},
        },
    )


def picture(sheet: AttackImages) -> Picture:
    """A sheet, drawn."""
    blocks = [
        ({name: images.cpu().numpy() for name, images in block.rows.items()}, block.notes) for block in sheet.blocks
    ]
    figure = rows_picture(sheet.title, blocks, (sheet.low, sheet.high))
    return Picture(sheet.name, figure, sheet.caption, f"{sheet.title}: rows of images.")
