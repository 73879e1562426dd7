"""A handler file that can't be imported."""

raise ImportError("no module named imaginary_ops")
