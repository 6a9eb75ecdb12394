"""Makes src/fewer/data/embedded/shakespeare-mini.tar.gz: python tools/make_shakespeare_mini.py DIR.

DIR is the folder shksprdata/texts of the package `shakespeare` 0.6 (Open Shakespeare). Its texts of the plays come from
Project Gutenberg and are in the public domain.
"""

import gzip
import io
import sys
import tarfile
from pathlib import Path

PLAYS = (
    "hamlet", "macbeth", "othello", "romeo_and_juliet", "julius_caesar", "twelfth_night", "much_ado_about_nothing",
    "antony_and_cleopatra", "coriolanus", "as_you_like_it", "measure_for_measure", "lear",
)  # fmt: skip
target = Path(__file__).parents[1] / "src/fewer/data/embedded/shakespeare-mini.tar.gz"
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as tar:
    for play in PLAYS:
        text = Path(sys.argv[1], f"{play}_gut.txt").read_bytes().replace(b"\r\n", b"\n")
        member = tarfile.TarInfo(f"{play}.txt")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
target.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
print(target, target.stat().st_size, "bytes")
