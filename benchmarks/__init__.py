"""The lab: what reproduces the project's own figures, run from a checkout with `python -m benchmarks.NAME`. Not in the wheel."""
