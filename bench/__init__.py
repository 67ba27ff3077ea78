"""Measurements side by side: `make bench ARGS="drain --systems dbqueue,pgqueuer"`. Figures are ratios from one run."""
