"""From a Plan to this rank's program: weights, stages, random numbers."""
