"""Which runs each cache supports, and why not the others. Data, shown by `wanref inspect`."""

from __future__ import annotations

from dataclasses import dataclass

_OTHER_FAMILIES = "I2V, TI2V and VACE are not run yet"
_UNSHARDED = "sequence and tensor parallel runs are not run yet"
_UNQUANTISED = "quantised checkpoints are not run yet"


@dataclass(frozen=True, slots=True)
class Scope:
    """One cache's scope, dimension by dimension: what is supported, and what is not and why."""

    families: str
    dtypes: str
    topologies: str
    experts: str
    sharding: str
    quantisation: str


SCOPES = {
    "teacache": Scope(
        families=f"Wan 2.1 and 2.2 T2V; {_OTHER_FAMILIES}",
        dtypes="float32, bfloat16, float16",
        topologies="every PP x CFG; each stage decides by its own coefficients",
        experts="single, high only, low only; dual with coefficients for each expert, since one set fits one model",
        sharding=f"none; {_UNSHARDED}",
        quantisation=f"none; {_UNQUANTISED}",
    ),
    "cache-dit": Scope(
        families=f"Wan 2.1 and 2.2 T2V; {_OTHER_FAMILIES}",
        dtypes="float32, bfloat16, float16",
        topologies="every PP x CFG whose smallest stage has more than fn + bn blocks, else there is nothing to skip",
        experts="single, dual, high only, low only; the low-noise expert has options of its own (low_...)",
        sharding=f"none; {_UNSHARDED}",
        quantisation=f"none; {_UNQUANTISED}",
    ),
    "fixed": Scope(
        families=f"Wan 2.1 and 2.2 T2V; {_OTHER_FAMILIES}",
        dtypes="float32, bfloat16, float16",
        topologies="every PP x CFG; steps are given for each stage and branch",
        experts="single, dual, high only, low only; an expert's first step always computes",
        sharding=f"none; {_UNSHARDED}",
        quantisation=f"none; {_UNQUANTISED}",
    ),
}
