"""From an annotated module to a ModelGraph, and from a Plan to this rank's program."""
