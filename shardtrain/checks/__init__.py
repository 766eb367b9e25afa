"""Check and analyse a user's loss, model and labels by tracing, before the first step."""
