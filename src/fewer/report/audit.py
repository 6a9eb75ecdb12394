"""The page of a privacy audit: metrics, images and limits."""

from __future__ import annotations

import json
from pathlib import Path

from fewer.audit import AttackImages, Audit
from fewer.audit.summary import HEADS, LIMITS, MEANING, summary_rows, verdicts
from fewer.report.files import write_files
from fewer.report.html import Picture, Table, render
from fewer.report.pictures import plot_image_rows

PAGE, METRICS = "audit.html", "audit.json"


def write_audit(audit: Audit, out: Path) -> list[Path]:
    """Writes the page, its pictures and all metrics into `out` and returns their paths, the page first."""
    pictures = [draw_images(images) for images in audit.images]
    rounds = "1 round" if audit.rounds == 1 else f"{audit.rounds} rounds"
    title = f"Privacy audit: {audit.method} on {audit.data} after {rounds}"
    values = {"title": title, "table": Table(HEADS, summary_rows(audit)), "audit": audit, "pictures": pictures}
    values["verdicts"] = verdicts(audit)
    files = {PAGE: render(PAGE, **values, meaning=MEANING, limits=LIMITS).encode()}
    files[METRICS] = (json.dumps(audit.as_json(), indent=1) + "\n").encode()
    return write_files(out, files | {f"{picture.name}.png": picture.png for picture in pictures})


def draw_images(images: AttackImages) -> Picture:
    """Draws the images of an attack."""
    blocks = [({name: row.cpu().numpy() for name, row in block.rows.items()}, block.notes) for block in images.blocks]
    figure = plot_image_rows(images.title, blocks, images.limits)
    return Picture(images.name, figure, images.caption, f"{images.title}: rows of images.")
