"""The verifier: a plan on real CPU processes against one device. Its entry is `check.verify`."""
