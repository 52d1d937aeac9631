"""Plan + costs -> Timeline: when every action of the very Schedule that runs would run."""
