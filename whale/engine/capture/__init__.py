"""From an annotated module to a ModelGraph."""
