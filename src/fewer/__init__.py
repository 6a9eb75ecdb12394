"""Fewer: federated learning in fewer rounds, with fewer samples and fewer bytes."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewer import data as data
    from fewer.errors import FewerError as FewerError
    from fewer.experiments.compare import compare as compare
    from fewer.methods import Client as Client
    from fewer.methods import Method as Method
    from fewer.methods.alone import Alone as Alone
    from fewer.methods.fedavg import FedAvg as FedAvg
    from fewer.methods.fedavg_meta import FedAvgMeta as FedAvgMeta
    from fewer.methods.fedbn import FedBN as FedBN
    from fewer.methods.feddistill import FedDistill as FedDistill
    from fewer.methods.fedensemble import FedEnsemble as FedEnsemble
    from fewer.methods.fedgen import FedGen as FedGen
    from fewer.methods.fedmeta import FedMeta as FedMeta
    from fewer.methods.fedprox import FedProx as FedProx
    from fewer.methods.frl import FRL as FRL
    from fewer.methods.local import Local as Local
    from fewer.methods.metafed import MetaFed as MetaFed
    from fewer.methods.per_fedavg import PerFedAvg as PerFedAvg
    from fewer.methods.reptile import Reptile as Reptile
    from fewer.runs import Result as Result
    from fewer.runs import load as load
    from fewer.runs import resume as resume
    from fewer.runs import run as run
    from fewer.runs.inference import deploy as deploy
    from fewer.runtime import Clients as Clients
    from fewer.runtime import on_client as on_client
    from fewer.runtime import on_ring as on_ring

__version__ = "0.1.0"

# Imported when first used: `import fewer` and `fewer --help` must not wait for torch.
_HOMES = {
    "FewerError": "fewer.errors",
    "compare": "fewer.experiments.compare",
    "Method": "fewer.methods",
    "Client": "fewer.methods",
    "Alone": "fewer.methods.alone",
    "FedAvg": "fewer.methods.fedavg",
    "FedAvgMeta": "fewer.methods.fedavg_meta",
    "FedBN": "fewer.methods.fedbn",
    "FedDistill": "fewer.methods.feddistill",
    "FedEnsemble": "fewer.methods.fedensemble",
    "FedGen": "fewer.methods.fedgen",
    "FedMeta": "fewer.methods.fedmeta",
    "FedProx": "fewer.methods.fedprox",
    "FRL": "fewer.methods.frl",
    "Local": "fewer.methods.local",
    "MetaFed": "fewer.methods.metafed",
    "PerFedAvg": "fewer.methods.per_fedavg",
    "Reptile": "fewer.methods.reptile",
    "Result": "fewer.runs",
    "load": "fewer.runs",
    "resume": "fewer.runs",
    "run": "fewer.runs",
    "deploy": "fewer.runs.inference",
    "Clients": "fewer.runtime",
    "on_client": "fewer.runtime",
    "on_ring": "fewer.runtime",
}
__all__ = ["__version__", "data", *_HOMES]


def __getattr__(name: str) -> Any:
    if name != "data" and name not in _HOMES:
        raise AttributeError(f"module 'fewer' has no attribute '{name}'")
    collects = gc.isenabled()
    gc.disable()  # importing torch makes a million objects and no garbage: looking through them takes 0.2 s
    try:
        return import_module("fewer.data") if name == "data" else getattr(import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()
