"""What every part speaks: clusters, model graphs, plans and schedules, as frozen values without torch."""
