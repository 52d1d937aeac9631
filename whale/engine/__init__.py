"""From an annotated module to a ModelGraph (capture), and from a Plan to this rank's program (lower)."""
