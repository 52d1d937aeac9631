"""What every part speaks.

Clusters, model graphs, plans and schedules, as frozen values without torch.
"""
