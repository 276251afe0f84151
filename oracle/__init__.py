"""The equivalence oracle: proves that a cached or parallel run is the run that was asked for."""
