"""How a run is watched."""
