"""The names that settings may take, free of imports, so that `--help` is quick."""

from typing import Literal

Partition = Literal["iid", "dirichlet", "dirichlet-pairs", "pathological", "shards", "quantity", "natural"]
Norm = Literal["batch", "group", "none"]
Codec = Literal["float32", "float16", "bfloat16", "int8", "uint8"]
RuntimeName = Literal["inline", "pool", "flower"]
