"""How a cache profile is qualified: calibrate, freeze, accept."""
