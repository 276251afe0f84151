"""How the oracle itself is tried: planted faults that it must find, and benign variants that it must let pass."""
